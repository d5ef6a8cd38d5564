"""Seconds per step of TRL's GRPOTrainer against Tiller's, on the same model, the same work and the
same cores.

Usage: python scripts/bench/against_trl.py [--rounds N] [--steps N] [--trl-env DIR] [--json]

Both train a Qwen3 of 3.3 million random parameters from one folder, in fp32, by GRPO with DAPO's
loss: 8 prompts x 8 completions x 32 tokens a step, none shorter, with the same prompts and reward
(grpo_work.py). They run alternately, each with the whole host. A process that computes alone has
one thread per core: TRL's, and Tiller's two in lockstep. With rollouts of the previous step
(max_staleness 1), Tiller's two processes compute at once and have one thread each. Both sides
compile their models, and Tiller computes a prompt once for four of its completions
(trainer.prompt_sharing); TRL has no such option. Tiller has the default canary and records. The
ratio is that of the faster run. A step's seconds are the median of
those after the first five; ratios are medians over the rounds.

All threads wait for each other as trainer.threads has them wait. TRL's step is fastest with that:
one thread and OMP_WAIT_POLICY=PASSIVE alone were slower, OpenMP's default was not faster, and
neither were two data-parallel processes with one thread each.

TRL is installed, once, into an environment of its own from the package index that pip is configured
for; nothing else is downloaded.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_work import MODEL, NEW_TOKENS, PROMPTS, SAMPLES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "scripts"))
from package_env import environment_python  # noqa: E402

TRL_ENV = Path("~/.cache/tiller-bench/trl")
PINNED = (
    "trl==1.16.0",
    "torch==2.13.0",
    "transformers==5.23.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
)
WARM_UP = 5
TIMEOUT_S = 1800.0
CORES = os.cpu_count() or 1
FAST = ["--trainer.prompt_sharing", "4", "--trainer.compile.enable", "--generator.no-enforce_eager"]
OURS = {
    "lockstep": [*FAST, "--trainer.threads", str(CORES), "--generator.threads", str(CORES)],
    "ahead": [*FAST, "--rollout.max_staleness", "1"],
}
"""Options of Tiller's runs, by name."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


def trl_python(folder: Path) -> Path:
    """Return the interpreter of TRL's environment: see package_env.py."""
    return environment_python(folder, PINNED, name="against_trl: TRL")


def write_model(folder: Path, fields: dict[str, Any] = MODEL) -> None:
    """Write random weights, and a tokenizer whose vocabulary has the size of the model's."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    import rl  # noqa: F401  # before anything imports torchtitan, which asks it for the device
    from rl.model.shape import ModelConfig, hf_config, shape_of

    logging.disable_progress_bar()
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**hf_config(shape_of(ModelConfig(**fields))))).save_pretrained(
        folder
    )
    words = Tokenizer(
        WordLevel({f"w{token}": token for token in range(fields["vocab_size"])}, unk_token="w0")
    )
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)


def run_trl(python: Path, model: Path, steps: int) -> list[float]:
    """Return the seconds of each of TRL's steps."""
    from rl.host.platform import thread_variables

    out = _run([python, HERE / "grpo_trl.py", model, str(steps)], **thread_variables(CORES))
    return list(json.loads(out.splitlines()[-1])["seconds"])


def run_ours(model: Path, steps: int, folder: Path, *overrides: str) -> list[float]:
    """Return the seconds of each of our steps, from the record of a run in ``folder``."""
    fields = {"--model.hf_path": model, "--steps": str(steps), "--output-dir": folder}
    options = [word for pair in fields.items() for word in pair]
    paths = os.pathsep.join(map(str, (ROOT, HERE)))
    _run(
        [
            sys.executable,
            "-m",
            "rl.train",
            "--config",
            "grpo_ours.even_tokens",
            *options,
            *overrides,
        ],
        PYTHONPATH=paths,
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lengths = {row["completion/length_mean"] for row in rows}
    assert lengths == {NEW_TOKENS}, f"completions of {lengths} tokens"
    return [row["timing/step"] for row in rows]


def _run(command: Sequence[str | Path], **variables: str) -> str:
    """Return the output of a command. Raises SystemExit with its errors if it fails."""
    environment = {**os.environ, **OFFLINE, **variables}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise SystemExit(f"{done.stderr}against_trl: this failed: {' '.join(map(str, command))}")
    return done.stdout


def compare(python: Path, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """Measure all sides alternately."""
    model = folder / "model"
    write_model(model)
    seconds: dict[str, list[float]] = {"trl": [], **{name: [] for name in OURS}}
    for number in range(rounds):
        for name in seconds:
            if name == "trl":
                steps_s = run_trl(python, model, steps)
            else:
                steps_s = run_ours(model, steps, folder / f"{name}-{number}", *OURS[name])
            seconds[name].append(statistics.median(steps_s[WARM_UP:]))
            print(f"round {number + 1}: {name:8} {seconds[name][-1]:.3f} s a step", flush=True)
    return result_of(seconds)


def result_of(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return the medians of the rounds' ratios, and their extremes. ``trl_over_ours`` is that of
    our faster run.
    """
    rounds = {
        f"trl_over_{name}": [t / o for t, o in zip(seconds["trl"], seconds[name], strict=True)]
        for name in OURS
    }
    ratios = {name: statistics.median(values) for name, values in rounds.items()}
    return {
        "trl_over_ours": max(ratios.values()),
        **ratios,
        "spread": {name: [min(values), max(values)] for name, values in rounds.items()},
        "seconds_per_step": {name: statistics.median(values) for name, values in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns that each side takes")
    parser.add_argument(
        "--steps", type=int, default=25, help=f"of each turn, {WARM_UP} of them to warm up"
    )
    parser.add_argument(
        "--trl-env", type=Path, default=TRL_ENV, help=f"TRL's environment (default {TRL_ENV})"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps: {arguments.steps} leaves none after the {WARM_UP} to warm up")
    python = trl_python(arguments.trl_env.expanduser())
    print(
        f"{PROMPTS} prompts x {SAMPLES} completions x {NEW_TOKENS} tokens, {os.cpu_count()} cores, "
        f"{PINNED[0]}"
    )
    with tempfile.TemporaryDirectory() as folder:
        result = compare(python, arguments.rounds, arguments.steps, Path(folder))
    print(", ".join(f"{name} {value:.2f}" for name, value in result.items() if "_over_" in name))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
