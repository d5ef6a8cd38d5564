"""Requests per second, and CPU time of a request, of Tiller's gateway against vLLM's own server
with the API of OpenAI.

Usage: python scripts/bench/gateway.py [--rounds N] [--requests N] [--json]

Both servers have the same Qwen3 of 3.3 million random parameters in float32, with one thread and
without compilation: ``python -m rl.serve`` the model that Tiller trains, and vLLM its own. One
client sends completions of 16 tokens after prompts of 16 tokens, 32 at once, to each server in
turn. CPU time is that of all processes of a server. Ratios are medians over the rounds, above 1 if
Tiller's server is better.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

import tinker_work as work  # noqa: E402
from programs import OFFLINE, STOP_S, cpu_seconds  # noqa: E402
from tinker import write_served  # noqa: E402
from tinker_recipes import TEMPLATE  # noqa: E402

from rl.host.listening import listen  # noqa: E402

AT_ONCE = 32
START_S = 900.0
REQUEST_S = 300.0
NAME = "policy"
PROBLEM = {"question": "What is 2 + 2?", "answer": "#### 4"}


class Measured(NamedTuple):
    """Figures of one server in a round."""

    requests_per_s: float
    cpu_s: float
    """CPU seconds of a request."""


class Server:
    """A server at ``url``, which answers."""

    def __init__(self, process: psutil.Process, url: str):
        self._process = process
        self.url = url

    def measure(self, first: int, count: int) -> Measured:
        """Send ``count`` requests, from that of number ``first``."""
        before = cpu_seconds(self._process)
        begin = time.perf_counter()
        asyncio.run(_send(self.url, range(first, first + count)))
        seconds = time.perf_counter() - begin
        return Measured(count / seconds, (cpu_seconds(self._process) - before) / count)


async def _send(url: str, numbers: range) -> None:
    room = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": NAME,
            "prompt": work.tokens(f"prompt/{number}", work.PROMPT_TOKENS),
            "max_tokens": work.NEW_TOKENS,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": number,
        }
        async with room:
            answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        tokens = answer.json()["usage"]["completion_tokens"]
        assert tokens == work.NEW_TOKENS, f"{tokens} tokens"

    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, limits=limits) as client:
        await asyncio.gather(*(ask(client, number) for number in numbers))


@contextlib.contextmanager
def serving(command: list[Any], log: Path, **variables: str) -> Iterator[Server]:
    """Yield a server that ``command`` starts, to which a free port is added."""
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    given = [sys.executable, "-m", *map(str, command), "--port", str(port)]
    environment = {**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1", **variables}
    with log.open("w") as file:
        process = psutil.Popen(given, env=environment, stdout=file, stderr=file)
    server = Server(process, f"http://127.0.0.1:{port}")
    try:
        ends = time.monotonic() + START_S
        while not _answers(server.url):
            if process.poll() is not None or time.monotonic() > ends:
                raise SystemExit(f"{log.read_text()}\nthis does not serve: {' '.join(given)}")
            time.sleep(0.2)
        yield server
    finally:
        started = list[psutil.Process]()
        with contextlib.suppress(psutil.NoSuchProcess):
            started = process.children(recursive=True)
            process.terminate()
        process.wait()
        for left in psutil.wait_procs(started, STOP_S)[1]:  # vLLM's engine may outlive its server
            left.kill()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").is_success
    return False


def result_of(rounds: list[tuple[Measured, Measured]]) -> dict[str, Any]:
    """Return medians of the rounds' ratios; Tiller's side is the first one."""
    ratios = {
        "ours_over_vllm": [own.requests_per_s / other.requests_per_s for own, other in rounds],
        "vllm_over_ours_cpu": [other.cpu_s / own.cpu_s for own, other in rounds],
    }
    sides = {
        name: [statistics.median(values) for values in zip(*side, strict=True)]
        for name, side in zip(("ours", "vllm"), zip(*rounds, strict=True), strict=True)
    }
    return {
        **{name: statistics.median(values) for name, values in ratios.items()},
        "spread": {name: [min(values), max(values)] for name, values in ratios.items()},
        "requests_per_s": {name: rate for name, (rate, _) in sides.items()},
        "cpu_s": {name: seconds for name, (_, seconds) in sides.items()},
    }


def run(rounds: int, requests: int) -> dict[str, Any]:
    """Return the result of ``rounds`` turns of both servers, after one that does not count."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        write_served(model)
        (model / "chat_template.jinja").write_text(TEMPLATE)  # which the config asks for
        (folder / "task.jsonl").write_text(json.dumps(PROBLEM) + "\n")
        longest = str(work.MODEL["max_seq_len"])
        ours = ["rl.serve", "--config", "gsm8k_jsonl", "--model.hf_path", model]
        ours += ["--model.max_seq_len", longest, "--task.path", folder / "task.jsonl"]
        ours += ["--generator.threads", "1", "--task.max_prompt_tokens", "64"]
        ours += ["--rollout.max_tokens", "64"]
        theirs = ["vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32"]
        theirs += ["--served-model-name", NAME, "--max-model-len", longest, "--enforce-eager"]
        own = serving(ours, folder / "ours.log")
        free = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        other = serving(theirs, folder / "vllm.log", **free)
        with own as first, other as second:
            for number in range(rounds + 1):
                begin = number * requests
                pair = first.measure(begin, requests), second.measure(begin, requests)
                if number:
                    found.append(pair)
                    print(f"round {number}: {result_of([pair])}", flush=True)
    return result_of(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns that each server takes")
    parser.add_argument("--requests", type=int, default=512, help="requests of each turn")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    result = run(arguments.rounds, arguments.requests)
    print(", ".join(f"{name} {value:.2f}" for name, value in result.items() if "_over_" in name))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
