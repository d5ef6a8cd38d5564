"""Planned time of a step and planned memory of the trainer, over those that runs of a published
model have on this host.

Usage: python scripts/bench/plan_real.py [--model DIR --problems DIR] [--only NAME ...] [--steps N]
    [--json]

SmolLM2-135M-Instruct (scripts/real_model.py) trains by RL, by RL with adapters, by SFT and by DPO,
in float32 and, if the CPU has instructions for it, in bfloat16.
"step_over_measured" is the planned time of a step over the median of the steps after the first
one. "memory_over_peak" is the planned memory of the trainer over its peak RSS. "worst_step" and
"worst_memory" are the largest factors of all configs, whichever way they differ.

Without ``--model`` the model and the problems are downloaded.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from programs import OFFLINE, TIMEOUT_S, output_of, rows_of

from rl.compat.torch_internals import onednn_multiplies

sys.path.append(str(Path(__file__).parents[1]))
import real_model

RL = """--config gsm8k_jsonl --model.max_seq_len 256 --task.max_prompt_tokens 128
    --rollout.prompts_per_step 8 --rollout.samples_per_prompt 8 --rollout.max_tokens 96
    --evaluation.prompts 0 --generator.dtype {dtype}"""
EXAMPLES = """--model.max_seq_len 160 --task.max_tokens 160 --examples_per_step {examples}
    --validate_every 0 --trainer.micro_batch_tokens 2048"""
KINDS = {
    "rl": (RL, "train.jsonl"),
    "adapters": (f"{RL} trainer.lora:on --trainer.lora.rank 16", "train.jsonl"),
    "sft": (f"--config sft_jsonl {EXAMPLES.format(examples=32)}", "solved.jsonl"),
    "dpo": (f"--config dpo_jsonl {EXAMPLES.format(examples=8)}", "pairs.jsonl"),
}
"""Arguments of each kind of run, and its file of problems."""


def measure(arguments: list[str], folder: Path, steps: int) -> dict[str, float]:
    """Return the figures of the plan of a run, and of a run of ``steps`` steps."""
    plan = json.loads(
        output_of([sys.executable, "-m", "rl.plan", *arguments, "--json"], TIMEOUT_S, **OFFLINE)
    )
    (trainer,) = [each for each in plan["memory"]["ranks"] if each["mesh"] == "trainer"]
    planned = sum(each["bytes"] for each in trainer["items"]) / 2**30
    run = ["-m", "rl.train", *arguments, "--steps", str(steps), "--output_dir", folder]
    output_of([sys.executable, *run], TIMEOUT_S, **OFFLINE)
    rows = rows_of(folder / "metrics.jsonl")
    step = statistics.median(row["timing/step"] for row in rows[1:])
    peak = max(row["memory/peak"] for row in rows)
    return {
        "planned_s": plan["step"]["seconds"],
        "step_s": step,
        "step_over_measured": plan["step"]["seconds"] / step,
        "planned_gib": planned,
        "peak_gib": peak,
        "memory_over_peak": planned / peak,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--problems", type=Path)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=[*KINDS], metavar="NAME")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    dtypes = ["float32", *(["bfloat16"] if onednn_multiplies(torch.bfloat16) else [])]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        model = args.model or Path(temporary) / "model"
        problems = args.problems or Path(temporary) / "problems"
        if args.model is None or args.problems is None:
            real_model.main([str(model), "--problems", str(problems)])
        for kind in args.only:
            for dtype in dtypes:
                template, file = KINDS[kind]
                arguments = [*template.format(dtype=dtype).split(), "--model.hf_path", str(model)]
                arguments += ["--task.path", str(problems / file)]
                arguments += ["--trainer.training.mixed_precision_param", dtype]
                folder = Path(temporary) / f"{kind}-{dtype}"
                row = measure(arguments, folder, args.steps)
                found[f"{kind}, {dtype}"] = row
                print(
                    f"{kind}, {dtype}: step {row['planned_s']:.0f} s planned, {row['step_s']:.0f} "
                    f"measured; memory {row['planned_gib']:.1f} GiB planned, "
                    f"{row['peak_gib']:.1f} at the peak",
                    flush=True,
                )
    worst = {
        f"worst_{name}": max(max(row[key], 1 / row[key]) for row in found.values())
        for name, key in (("step", "step_over_measured"), ("memory", "memory_over_peak"))
    }
    if args.json:
        print(json.dumps({**worst, "configs": found}))


if __name__ == "__main__":
    main()
