"""Tokens per second of TRL's SFTTrainer and DPOTrainer against Tiller's trainers, on the same
model, the same data and the same cores.

Usage: python scripts/bench/sft_against_trl.py [--rounds N] [--steps N] [--trl-env DIR] [--json]

All train a Qwen3 of 3.3 million random parameters from one folder, in fp32: 32 examples a step for
SFT, of which the completion is trained, and 16 pairs a step for DPO, with lengths that vary as in
conversations (sft_work.py). Tokens are counted without padding. Each side has the whole host in
turn, in the way that is quickest for it: two processes of one thread, and for TRL one row in a
forward pass, which has no padding. DPO computes the reference's log-probs in each step on both
sides.

- SFT unpacked: a row for each example on both sides.
- SFT packed: rows of several examples on both sides. TRL packs its whole data set once, Tiller the
  examples of each step.
- DPO: TRL cannot pack pairs on a CPU. Tiller's runs packed and unpacked are both compared with it.

Unpacked, both sides train on the same batches in the same order, and their mean losses must agree.
A ratio is the median over the rounds. A side's tokens per second are those of a turn's steps after
the first three, all together. Tokens per CPU second count the CPU time of all processes of a side:
they say the same on a host that other programs use too.

TRL is installed as by against_trl.py.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from against_trl import HERE, ROOT, TRL_ENV, trl_python, write_model
from programs import rows_of, run_watched
from sft_work import EXAMPLES, MAX_TOKENS, MODEL, PAIRS, answers, preferences

WARM_UP = 3
MAX_LOSS_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class Side:
    """One way to train."""

    trainer: str
    """sft or dpo."""
    packing: bool
    trl: dict[str, int] | None = None
    """TRL's rows and passes, and its number of processes; None for Tiller."""
    overrides: list[str] = field(default_factory=list)
    """Options of Tiller."""


SIDES = {
    "trl_sft": Side("sft", False, {"rows": 1, "passes": 16, "processes": 2}),
    "trl_sft_packed": Side("sft", True, {"rows": 1, "passes": 5, "processes": 2}),
    "trl_dpo": Side("dpo", False, {"rows": 1, "passes": 8, "processes": 2}),
    "sft": Side("sft", False, overrides=["--trainer.micro_batch_tokens", str(MAX_TOKENS)]),
    "sft_packed": Side("sft", True),
    "dpo": Side("dpo", False),
    "dpo_packed": Side("dpo", True),
}
"""Sides of the comparison. TRL has one row per forward pass, which is its fastest setting: one row
has no padding. Tiller's micro-batches have room for two of the longest sequences (sft_ours.py), and
for one where rows are padded: fewer rows of different lengths are then in one of them."""

PAIRED = {
    "sft": "trl_sft",
    "sft_packed": "trl_sft_packed",
    "dpo": "trl_dpo",
    "dpo_packed": "trl_dpo",
}
"""Sides of Tiller, each with the side of TRL that it is compared with."""


def write_work(folder: Path, steps: int) -> None:
    """Write the model with its tokenizer, and the data in Tiller's order and in TRL's."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    from rl.data.order import step_indices

    write_model(folder / "model", MODEL)
    words = ["<pad>", "<eos>", *(f"w{token}" for token in range(2, MODEL["vocab_size"]))]
    vocabulary = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder / "model")
    for name, rows, size in (
        ("sft", answers(EXAMPLES * steps), EXAMPLES),
        ("dpo", preferences(PAIRS * steps), PAIRS),
    ):
        order = [at for step in range(steps) for at in step_indices(0, step, size, len(rows))]
        _write_rows(folder / f"{name}.jsonl", rows)
        _write_rows(folder / f"{name}_in_order.jsonl", (rows[at] for at in order))


def _write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def run_trl(python: Path, side: Side, steps: int, work: Path, folder: Path) -> dict[str, Any]:
    """Return seconds and tokens of each of TRL's steps, and the mean loss."""
    assert side.trl is not None
    path = folder.with_suffix(".json")
    fields = {
        "model": str(work / "model"),
        "data": str(work / f"{side.trainer}_in_order.jsonl"),
        "trainer": side.trainer,
        "packing": side.packing,
        "steps": steps,
        "progress": str(folder.with_suffix(".progress")),
    }
    path.write_text(json.dumps(fields | side.trl))
    processes = side.trl["processes"]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    out, cpu_s = run_watched(
        [python, *(launcher if processes > 1 else []), HERE / "sft_trl.py", path],
        folder.with_suffix(".progress"),
        (WARM_UP, steps),
        OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // processes)),
        OMP_WAIT_POLICY="PASSIVE",
    )
    return json.loads(out.splitlines()[-1]) | {"cpu_s": cpu_s}


def run_ours(side: Side, steps: int, work: Path, folder: Path) -> dict[str, Any]:
    """Return seconds and tokens of each of Tiller's steps, and the mean loss."""
    fields = {
        "--config": f"sft_ours.{side.trainer}_words",
        "--model.hf_path": work / "model",
        "--task.path": work / f"{side.trainer}.jsonl",
        "--steps": steps,
        "--output-dir": folder,
    }
    options = [str(word) for pair in fields.items() for word in pair]
    options += ["--trainer.packing" if side.packing else "--trainer.no-packing"]
    _, cpu_s = run_watched(
        [sys.executable, "-m", "rl.train", *options, *side.overrides],
        folder / "metrics.jsonl",
        (WARM_UP, steps),
        PYTHONPATH=os.pathsep.join(map(str, (ROOT, HERE))),
    )
    rows = rows_of(folder / "metrics.jsonl")
    return {
        "seconds": [row["timing/step"] for row in rows],
        "tokens": [row["timing/step"] * row["tokens_per_s"] for row in rows],
        "loss": statistics.mean(row["loss/mean"] for row in rows),
        "cpu_s": cpu_s,
    }


def compare(
    python: Path, rounds: int, steps: int, folder: Path, names: list[str]
) -> dict[str, Any]:
    """Measure all sides alternately. Return the result of ``result_of``."""
    write_work(folder / "work", steps)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for number in range(rounds):
        for name in names:
            side = SIDES[name]
            own = folder / f"{name}-{number}"
            if side.trl is not None:
                ran = run_trl(python, side, steps, folder / "work", own)
            else:
                ran = run_ours(side, steps, folder / "work", own)
            speeds[name].append(tokens_per_s(ran))
            cpu[name].append(sum(ran["tokens"][WARM_UP:]) / ran["cpu_s"])
            losses[name] = ran["loss"]
            line = f"{speeds[name][-1]:7.0f} tokens/s {cpu[name][-1]:7.0f} tokens/CPU-s"
            print(f"round {number + 1}: {name:15} {line}", flush=True)
    check_losses(losses)
    return result_of(speeds) | {"cpu": result_of(cpu)}


def tokens_per_s(ran: dict[str, Any]) -> float:
    """Return the tokens per second of the steps after the first ones."""
    return float(sum(ran["tokens"][WARM_UP:]) / sum(ran["seconds"][WARM_UP:]))


def check_losses(losses: dict[str, float]) -> None:
    """Raise SystemExit if a side's mean loss differs from that of the same batches."""
    for name, other in PAIRED.items():
        other = "trl_sft" if name == "sft_packed" else other
        if name in losses and other in losses:
            apart = abs(losses[name] - losses[other])
            if apart > MAX_LOSS_DIFFERENCE:
                raise SystemExit(
                    f"sft_against_trl: the mean loss of {name} is {losses[name]:.6f}, that of "
                    f"{other} {losses[other]:.6f}: they did not do the same work"
                )


def result_of(speeds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the medians of the rounds' ratios. A short key has the smaller ratio of unpacked and
    packed.
    """
    ratios = {
        name: [mine / its for mine, its in zip(speeds[name], speeds[other], strict=True)]
        for name, other in PAIRED.items()
        if name in speeds and other in speeds
    }
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    result: dict[str, Any] = {}
    if {"sft", "sft_packed"} <= medians.keys():
        result["trl_over_ours"] = min(medians["sft"], medians["sft_packed"])
    if {"dpo", "dpo_packed"} <= medians.keys():
        result["trl_over_ours_dpo"] = min(medians["dpo"], medians["dpo_packed"])
    long_names = {"dpo": "dpo_unpacked"}
    for name, value in medians.items():
        result[f"trl_over_ours_{long_names.get(name, name)}"] = value
    return result | {
        "spread": {name: [min(values), max(values)] for name, values in ratios.items()},
        "tokens_per_s": {name: statistics.median(values) for name, values in speeds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns that each side takes")
    parser.add_argument("--steps", type=int, default=17, help="steps of each turn that count")
    parser.add_argument(
        "--trl-env", type=Path, default=TRL_ENV, help=f"TRL's environment (default {TRL_ENV})"
    )
    parser.add_argument("--only", nargs="+", choices=SIDES, default=[*SIDES], help="sides to run")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps: {arguments.steps} is no number of steps that count; give 1 or more")
    python = trl_python(arguments.trl_env.expanduser())
    with tempfile.TemporaryDirectory() as folder:
        steps = WARM_UP + arguments.steps
        result = compare(python, arguments.rounds, steps, Path(folder), arguments.only)
    print(", ".join(f"{name} {value:.2f}" for name, value in result.items() if "_over_" in name))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
