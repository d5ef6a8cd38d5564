"""Cost of the pages of a run: time to the first page, and size of the page.

Usage: python scripts/bench/view.py [--repeats N] [--steps N] [--json]

A run folder of ``--steps`` steps has 70 metrics and 20 spans a step, as a run of the quickstart
config. "first_page_s" is the time from the start of ``python -m rl.view`` until the
files of the page and the data of its first page have arrived, "refresh_s" the time of the data
of one more step, and "rollouts_s" that of the table of a step of 1,024 rollouts of 512 tokens.
Numbers are medians over the repeats; "bytes" are those of the page without data.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from rl.observe.rollout_files import Chunk, write_rollouts
from rl.types import Prompt, Rollout, Sequence

METRICS = 60
SPANS = 20
ROLLOUTS = 1_024
TOKENS = 512
CURVES = ("reward/mean", "loss/mean", "entropy/mean", "timing/step", *(f"m/{i}" for i in range(8)))
NAMES = (*CURVES, *(f"m/{index}" for index in range(8, METRICS)))


def line(row: dict) -> str:
    return json.dumps(row) + "\n"


def metrics_of(step: int) -> dict:
    values = {name: step * 0.123456789 / (index + 1) for index, name in enumerate(NAMES)}
    return {"step": step, "policy_version": step, **values}


def make_run(folder: Path, steps: int) -> None:
    """Write a run folder of ``steps`` steps."""
    config = {"name": "bench", "command": "", "config": {"steps": steps}}
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "metrics.jsonl", "w") as rows, open(folder / "events.jsonl", "w") as events:
        events.write(line({"time": 0.0, "kind": "started", "step": 0, "host": "h", "pid": 1}))
        for step in range(1, steps + 1):
            row = metrics_of(step)
            rows.write(line(row))
            span = {"time": step, "kind": "span", "process": "trainer", "name": "forward_backward"}
            span |= {"begin": step - 0.512345, "end": step - 0.012345, "step": step}
            events.write(line(span) * SPANS)
            events.write(line({"time": step, "kind": "metrics", "step": step, "metrics": row}))
    (folder / "rollouts").mkdir()
    sampled = np.arange(TOKENS) >= 64
    columns = {name: np.zeros(ROLLOUTS * TOKENS, np.float32) for name in ("advantages", "entropy")}
    rollouts = [_rollout(index, sampled) for index in range(ROLLOUTS)]
    path = folder / "rollouts" / f"step-{steps}.parquet"
    write_rollouts(path, [Chunk(rollouts=rollouts, columns=columns)], version=steps)


def _rollout(index: int, sampled: np.ndarray) -> Rollout:
    tokens = (np.arange(TOKENS, dtype=np.int32) * (index + 1)) % 50_000
    sequence = Sequence(
        tokens=tokens,
        sampled=sampled,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        versions=np.where(sampled, index, -1).astype(np.int32),
    )
    prompt = Prompt(
        prompt_id=index // 8, tokens=[1] * 64, text="a prompt " * 20, answer="", task=""
    )
    return Rollout(
        prompt=prompt,
        sample=index % 8,
        sequences=(sequence,),
        text="an answer " * 100,
        stop_reason="stop",
        reward=index % 2,
        metrics={},
    )


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return bytes(answer.read())


def first_page(url: str) -> int:
    """Fetch what the first page needs; return the bytes of the page without data."""
    page = fetch(url)
    names = re.findall(rb'(?:src|href)="/([a-z.]+)"', page)
    size = len(page) + sum(len(fetch(url + name.decode())) for name in names)
    fetch(f"{url}api/runs")
    fetch(f"{url}api/state?run=0")
    fetch(f"{url}api/curves?run=0&points=600&names={','.join(CURVES)}")
    return size


def measure(folder: Path, steps: int) -> dict[str, float]:
    """Return the seconds of one start of the program."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "rl.view", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        url = process.stdout.readline().strip()
        size = first_page(url)
        shown = time.perf_counter()
        with open(folder / "metrics.jsonl", "a") as rows:
            rows.write(line(metrics_of(steps + 1)))
        fetch(f"{url}api/state?run=0")
        fetch(f"{url}api/curves?run=0&points=600&names={','.join(CURVES)}")
        refreshed = time.perf_counter()
        fetch(f"{url}api/table?run=0&step={steps}")
        listed = time.perf_counter()
    finally:
        process.kill()
        process.wait()
    return {
        "first_page_s": shown - began,
        "refresh_s": refreshed - shown,
        "rollouts_s": listed - refreshed,
        "bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder), options.steps)
        rows = [measure(Path(folder), options.steps) for _ in range(options.repeats)]
    result = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(
        f"{options.steps} steps: the first page after {result['first_page_s']:.2f} s, one more "
        f"step after {result['refresh_s']:.3f} s, a table of {ROLLOUTS} rollouts after "
        f"{result['rollouts_s']:.2f} s; the page has {result['bytes'] / 1e3:.0f} kB"
    )
    if options.json:
        print(json.dumps({"steps": options.steps, **result}))


if __name__ == "__main__":
    main()
