"""Every budget of the benchmarks in one table: medians of rounds, with their extremes.

Usage: python scripts/bench/budgets.py [--rounds N] [--only NAME ...] [--results FILE] [--json]

A round runs each program once, with few turns of its own. Programs take turns, so that a busy
minute of the host spoils one round of each. What is not a time (layouts.py, algorithms.py) runs in
the first round only. Each round's figures are appended to FILE as JSON lines; the same command goes
on from there. Seven rounds take about three hours on two cores.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent


class Budget(NamedTuple):
    """Bound of a figure of a program. ``key`` is the path to the figure in the program's JSON."""

    program: str
    key: str
    at_most: float | None = None
    at_least: float | None = None

    def holds(self, value: float) -> bool:
        below = self.at_most is None or value <= self.at_most
        return below and (self.at_least is None or value >= self.at_least)

    def __str__(self) -> str:
        return f"≤ {self.at_most:g}" if self.at_least is None else f"≥ {self.at_least:g}"


ROUND = {
    "weight_push": ["--rounds", "1", "--no-sizes", "--transports", "shared_memory", "torchstore"],
    "push_network": ["--rounds", "1"],
    "trainer": ["--repeats", "1"],
    "generator": ["--rounds", "1"],
    "overlap": ["--rounds", "1"],
    "controller": ["--repeats", "1"],
    "against_trl": ["--rounds", "1", "--steps", "8"],
    "sft_against_trl": ["--rounds", "1"],
    "plain_loop": ["--rounds", "1", "--seed", "{round}"],
    "router_replay": ["--rounds", "1"],
    "episodes": ["--rounds", "1", "--repeats", "1"],
    "tinker": ["--rounds", "1"],
    "view": ["--repeats", "1"],
}
"""Arguments of a round, by program. ``{round}`` is its number, from 0."""

ONCE: dict[str, list[str]] = {"layouts": [], "algorithms": []}

BUDGETS = (
    Budget("weight_push", "pull_over_memcpy", at_most=1.15),
    Budget("weight_push", "total_over_memcpy", at_most=3.0),
    Budget("weight_push", "torchstore_over_ours", at_least=10),
    Budget("push_network", "fetch_over_sockets", at_most=1.5),
    Budget("push_network", "collective_over_plain", at_most=1.15),
    Budget("layouts", "max_loss_delta", at_most=1e-4),
    Budget("layouts", "max_grad_error", at_most=1e-5),
    Budget("trainer", "ours_over_bare", at_least=0.97),
    Budget("trainer", "naive_over_ours_logprob_memory", at_least=4),
    Budget("generator", "ours_over_engine", at_least=0.95),
    Budget("generator", "unified_over_native", at_least=0.9),
    Budget("overlap", "step_over_max_stage", at_most=1.15),
    Budget("controller", "rollouts_per_s", at_least=2000),
    Budget("controller", "cost_growth", at_most=1.2),
    Budget("controller", "cost_growth_generators", at_most=1.5),
    Budget("controller", "checkpoint_pause_s", at_most=0.5),
    Budget("against_trl", "uniform.asynchronous", at_least=1.2),
    Budget("against_trl", "uniform.lockstep", at_least=1.0),
    Budget("against_trl", "varied.asynchronous", at_least=4.0),
    Budget("against_trl", "varied.lockstep", at_least=3.0),
    Budget("against_trl", "long_prompts.asynchronous", at_least=2.0),
    Budget("against_trl", "long_prompts.lockstep", at_least=1.5),
    Budget("sft_against_trl", "trl_over_ours_sft", at_least=1.0),
    Budget("sft_against_trl", "trl_over_ours_sft_packed", at_least=1.2),
    Budget("sft_against_trl", "trl_over_ours_dpo_unpacked", at_least=1.0),
    Budget("sft_against_trl", "trl_over_ours_dpo_packed", at_least=1.2),
    Budget("sft_against_trl", "cpu.trl_over_ours_sft", at_least=1.0),
    Budget("sft_against_trl", "cpu.trl_over_ours_sft_packed", at_least=1.2),
    Budget("sft_against_trl", "cpu.trl_over_ours_dpo_unpacked", at_least=1.0),
    Budget("sft_against_trl", "cpu.trl_over_ours_dpo_packed", at_least=1.2),
    Budget("plain_loop", "ours_over_plain", at_most=3.0),
    Budget("plain_loop", "ours_over_plain_3m", at_most=1.3),
    Budget("router_replay", "replayed_over_free", at_most=0.5),
    Budget("router_replay", "recording", at_most=1.05),
    Budget("algorithms", "solved", at_least=5),
    Budget("episodes", "ours_over_engine", at_least=0.95),
    Budget("episodes", "cached", at_least=0.9),
    Budget("tinker", "session_over_server", at_least=0.9),
    Budget("view", "first_page_s", at_most=2),
    Budget("view", "bytes", at_most=500_000),
)


def run(program: str, arguments: list[str]) -> dict[str, Any] | None:
    """Return the JSON object of a program. None if the program fails, which is printed."""
    command = [sys.executable, str(HERE / f"{program}.py"), *arguments, "--json"]
    began = time.monotonic()
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    print(f"{program}: {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode:
        print(f"{program} failed: {(done.stderr or done.stdout)[-500:]}", flush=True)
        return None
    return dict(json.loads(done.stdout.splitlines()[-1]))


def figure(found: dict[str, Any], key: str) -> float | None:
    """Return a figure, or the length of a list. None if the program did not measure it."""
    value: Any = reduce(lambda at, part: at.get(part, {}), key.split("."), found)
    return None if value == {} else float(len(value) if isinstance(value, list) else value)


def table(rounds: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each budget of the programs that ran."""
    rows = []
    for budget in BUDGETS:
        measured = [figure(found, budget.key) for found in rounds.get(budget.program, [])]
        if values := [value for value in measured if value is not None]:
            median = statistics.median(values)
            rows.append(
                {
                    "program": budget.program,
                    "key": budget.key,
                    "budget": str(budget),
                    "median": median,
                    "spread": [min(values), max(values)],
                    "rounds": len(values),
                    "holds": budget.holds(median),
                }
            )
    return rows


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def show(rows: list[dict[str, Any]]) -> None:
    print("| program | key | budget | median | spread | rounds | holds |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        low, high = map(shown, row["spread"])
        cells = (row["budget"], shown(row["median"]), f"{low} to {high}", str(row["rounds"]))
        answer = "yes" if row["holds"] else "no"
        print(f"| `{row['program']}.py` | `{row['key']}` | {' | '.join(cells)} | {answer} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="runs of each program")
    names = [*ROUND, *ONCE]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep the rounds in this file")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    rounds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    if arguments.results and arguments.results.exists():
        for line in arguments.results.read_text().splitlines():
            name, found = json.loads(line)
            rounds[name].append(found)
    for number in range(arguments.rounds):
        for name in arguments.only:
            wanted = 1 if name in ONCE else number + 1
            if len(rounds[name]) >= wanted:
                continue
            given = [each.format(round=number) for each in ROUND.get(name, [])]
            if found := run(name, given):
                rounds[name].append(found)
                if arguments.results:
                    with arguments.results.open("a") as file:
                        print(json.dumps([name, found]), file=file)
    rows = table(rounds)
    show(rows)
    if arguments.json:
        print(json.dumps({"budgets": rows}))


if __name__ == "__main__":
    main()
