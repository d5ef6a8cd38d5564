"""Seconds per step, and samples per second, of a client of the Tinker SDK against the session that
its server runs on.

Usage: python scripts/bench/tinker.py [--rounds N] [--steps N] [--tinker-env DIR] [--json]

Both sides train an adapter of rank 16 on a Qwen3 of 3.3 million random parameters with the same 16
sequences of 128 tokens, one forward_backward and one optimizer step at a time, and have the same
loss. Then 64 clients draw 8 samples of 16 tokens each, every client one after another. The session
does both in a process that calls it directly (tinker_session.py). The server is ``python -m
rl.serve``, and its clients are the unmodified SDK in an environment of its own, 64 in 4 processes
(tinker_client.py). Then these clients, in 16 processes, have 32 samples each in flight at once, and
none of the 2,048 may be lost.
The sides run by turns, each with the whole host. A step's seconds are the median of those after the
first five; ratios are medians over the rounds.

Then one client, and two with an adapter each, take the same number of rounds of a step, a snapshot
and samples of it (tinker_turns.py).
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "scripts"))

from against_trl import write_model  # noqa: E402
from programs import output_of  # noqa: E402
from tinker_env import TINKER_ENV, tinker_python  # noqa: E402
from tinker_recipes import serving  # noqa: E402
from tinker_work import MODEL  # noqa: E402

WARM_UP = 5
TIMEOUT_S = 900.0
VARIABLES = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE))), "OMP_NUM_THREADS": "1"}
LOSS = 1e-4
"""Largest relative difference of the last losses of both sides."""


def write_served(folder: Path) -> None:
    """Write the model, with a tokenizer that has the eos_token that a server needs."""
    from transformers import PreTrainedTokenizerFast

    write_model(folder, MODEL)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.save_pretrained(folder)


def run_server(python: Path, model: Path, steps: int) -> dict[str, Any]:
    """Return the measurements of the SDK's client."""
    return _serve(model, python, "tinker_client.py", str(steps))


def run_clients(python: Path, model: Path, clients: int, rounds: int) -> float:
    """Return the seconds of ``clients`` that train and sample by turns."""
    found = _serve(model, python, "tinker_turns.py", str(clients), str(rounds))
    return float(found["seconds"])


def _serve(model: Path, python: Path, program: str, *arguments: str) -> dict[str, Any]:
    """Return what a program of the SDK's environment measures of a new server."""
    client = [python, "-P", HERE / program]
    settings = {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "PYTHONPATH": ""}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--config", "tinker_session.served", "--model.hf_path", model]
        options += ["--output-dir", folder / "run"]
        with serving(options, folder / "server.log", **VARIABLES) as url:
            return _run([*client, url, *arguments], **VARIABLES | settings)


def run_session(model: Path, steps: int) -> dict[str, Any]:
    """Return the measurements of the session."""
    return _run([sys.executable, HERE / "tinker_session.py", model, str(steps)], **VARIABLES)


def _run(command: list[Any], **variables: str) -> dict[str, Any]:
    """Return the JSON object that a program prints last."""
    return dict(json.loads(output_of(command, TIMEOUT_S, **variables).splitlines()[-1]))


def result_of(
    rounds: list[tuple[dict[str, Any], dict[str, Any]]], turns: list[tuple[float, float]]
) -> dict[str, Any]:
    """Return medians of the rounds' ratios, of the session's side first and the server's second.
    ``turns`` are the seconds of one client and of two.
    """
    seconds = [[statistics.median(each["seconds"][WARM_UP:]) for each in pair] for pair in rounds]
    rates = [[each["samples_per_s"] for each in pair] for pair in rounds]
    ratios = {
        "session_over_server": [session / server for session, server in seconds],
        "server_over_session_samples": [server / session for session, server in rates],
        "largest_wait_over_mean": [
            max(server["waits"]) / statistics.mean(server["waits"]) for _, server in rounds
        ],
        "largest_flood_wait_over_mean": [
            max(server["flood_waits"]) / statistics.mean(server["flood_waits"])
            for _, server in rounds
        ],
        "two_adapters_over_one": [two / one for one, two in turns],
    }
    return {
        **{name: statistics.median(values) for name, values in ratios.items()},
        "spread": {name: [min(values), max(values)] for name, values in ratios.items()},
        "seconds_per_step": _by_side(seconds),
        "samples_per_s": _by_side(rates),
    }


def _by_side(pairs: list[list[float]]) -> dict[str, float]:
    names = ("session", "server")
    columns = zip(*pairs, strict=True)
    return {name: statistics.median(own) for name, own in zip(names, columns, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns that each side takes")
    parser.add_argument("--steps", type=int, default=20, help="steps of each turn that count")
    parser.add_argument("--tinker-env", type=Path, default=TINKER_ENV, help="the SDK's environment")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps: {arguments.steps} is no number of steps that count; give 1 or more")
    steps = WARM_UP + arguments.steps
    python = tinker_python(arguments.tinker_env)
    rounds = []
    turns = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        write_served(model)
        for number in range(arguments.rounds):
            sides = run_session(model, steps), run_server(python, model, steps)
            losses = [each["loss"] for each in sides]
            assert math.isclose(*losses, rel_tol=LOSS), f"losses differ: {losses}"
            rounds.append(sides)
            one, two = (run_clients(python, model, count, steps // 2 * 2) for count in (1, 2))
            turns.append((one, two))
            result = result_of([sides], turns[-1:])
            print(f"round {number + 1}: {result['seconds_per_step']}, {result['samples_per_s']}")
    result = result_of(rounds, turns)
    print(", ".join(f"{name} {value:.2f}" for name, value in result.items() if "_over_" in name))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
