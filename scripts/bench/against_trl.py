"""Trained tokens per second of Tiller's RL trainer against TRL's GRPOTrainer, on the same model,
the same work and the same cores.

Usage: python scripts/bench/against_trl.py [--only KIND ...] [--rounds N] [--steps N] [--json]

Both train a model from one folder, by GRPO with DAPO's loss, an optimizer step for each batch, with
the same prompts and reward (grpo_work.py). They run alternately, each with the whole host. The
model is a Qwen3 of 3 million random parameters, in fp32, unless stated. Kinds of work:

- uniform: 8 prompts of 16 tokens x 8 completions of 32 tokens, none shorter.
- varied: 8 prompts of 16 tokens x 8 completions of at most 128 tokens. The model draws the token
  that ends one once in 32 tokens, so that the mean length is a quarter of the longest.
- long_prompts: 4 prompts of 512 tokens x 8 completions of 64 tokens, none shorter.
- real: SmolLM2-135M-Instruct (scripts/real_model.py) gives 8 word problems x 8 answers of at most
  96 tokens, in bfloat16. Most of its groups have equal rewards; Tiller does not train on them.
- real_defaults: the same, as both sides are configured by default.

Tiller runs in two ways. In lockstep all tokens of a batch are drawn by the weights that it updates,
as TRL draws them. Asynchronously they may be drawn by those before (max_staleness 1); TRL has no
such way on a CPU. Each side has settings for each kind of work (BEST). ``--settings`` tries others
(SETTINGS, WAYS); the fastest of a round counts. Tiller has the default canary and records.

A side's tokens per second are those of a turn's steps after the first ones, in which torch.compile
compiles, and before the last one, all together. A ratio is the median over the rounds. Ratios of
tokens per CPU second, of all processes, change less on a busy host.

All threads wait for each other as trainer.threads has them wait, with which TRL's step is fastest.

TRL is installed, once, into an environment of its own from the package index that pip is configured
for. The real kinds download the published model, and run only if --only names them.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_work import END, MODEL, WORKS
from programs import rows_of, run_watched

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "scripts"))
import real_model  # noqa: E402
from package_env import environment_python  # noqa: E402

TRL_ENV = Path("~/.cache/tiller-bench/trl")
PINNED = (
    "trl==1.16.0",
    "torch==2.13.0",
    "transformers==5.23.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
)
CORES = os.cpu_count() or 1
MAX_DIFFERENCE = 0.15
"""Largest relative difference of the mean lengths of both sides' completions."""


@dataclass(frozen=True)
class Setting:
    """Settings of TRL."""

    compiles: bool = True
    passes: int = 1
    """Number of parts into which each process divides a batch."""
    processes: int = 1
    batching: bool = False
    """Whether transformers' continuous batching generates. Otherwise ``generate`` does, for all
    completions together until the last one has ended."""
    ahead: int = 1
    """Number of steps whose completions are drawn at once."""
    bf16: bool = False
    """Whether autocast computes in bfloat16."""
    checkpointing: bool = False
    """Whether the backward pass computes activations again."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of GRPOConfig."""
        chosen: dict[str, Any] = {
            "torch_compile": self.compiles,
            "steps_per_generation": self.ahead * self.passes,
            "bf16": self.bf16,
            "gradient_checkpointing": self.checkpointing,
        }
        if self.batching:
            chosen["use_transformers_continuous_batching"] = True
        return chosen


SETTINGS = {
    "compiled": Setting(),
    "eager": Setting(compiles=False),
    "compiled-in-4": Setting(passes=4),
    "eager-in-4": Setting(compiles=False, passes=4),
    "compiled-2-processes": Setting(processes=2),
    "eager-2-processes": Setting(compiles=False, processes=2),
    "batching": Setting(batching=True),
    "ahead": Setting(ahead=2),
    "bf16": Setting(compiles=False, bf16=True),
    "bf16-batching": Setting(compiles=False, bf16=True, batching=True),
    "defaults": Setting(compiles=False, passes=8, bf16=True, checkpointing=True),
}
"""Settings of TRL by name."""

SHARED = ["--trainer.prompt_sharing", "8"]
FAST = ["--trainer.compile.enable", "--generator.no-enforce_eager", *SHARED]
THREADS = ["--trainer.threads", str(CORES)]
CHUNKS = ["--rollout.pipeline", "asynchronous", "--rollout.stream_chunks", "4"]
RANKS = [
    *("--trainer.parallelism.data_parallel_replicate_degree", "2"),
    *("--trainer.parallelism.data_parallel_shard_degree", "1"),
    *("--generator.replicas", "2"),
]
AHEAD = ["--rollout.max_staleness", "1"]
FREE = [*AHEAD, "--rollout.pipeline", "asynchronous", "--generator.inflight_policy", "continue"]
SKIP = ["--trainer.zero_gradient", "skip", *SHARED]
BF16 = [
    *("--trainer.training.mixed_precision_param", "bfloat16", "--generator.dtype", "bfloat16"),
    *SKIP,
]
WAYS = {
    "lockstep": {
        "threads": [*FAST, *THREADS, "--generator.threads", str(CORES)],
        "chunks": [*FAST, *CHUNKS],
        "ranks": [*FAST, *RANKS],
        "bfloat16": BF16,
        "float32": SKIP,
        "as-configured": [],
    },
    "asynchronous": {
        "ordered": [*FAST, *AHEAD],
        "free": [*FAST, *FREE],
        "free-threads": [*FAST, *FREE, *THREADS],
        "bfloat16-ordered": [*BF16, *AHEAD],
        "bfloat16-free": [*BF16, *FREE],
        "float32-free": [*SKIP, *FREE],
    },
}
"""Options of Tiller by way and by the name of the setting:

- threads: Trainer and generator compute in turns, each on all cores.
- chunks: A quarter of the groups is trained on while the rest is drawn.
- ranks: Two generators draw half of the groups each, and two ranks of the trainer learn from them.
- ordered: A batch is drawn whole while the batch before is trained on.
- free: Requests of the next batch begin as soon as staleness allows, so that the engine is full.
- free-threads: The same, and the trainer uses cores that the generator leaves.
- bfloat16, bfloat16-ordered, bfloat16-free, float32, float32-free: The same, not compiled.
- as-configured: No options.
"""
BEST = {
    "uniform": ["compiled", "compiled-2-processes", "threads", "ranks", "ordered"],
    "varied": ["compiled", "ranks", "ordered"],
    "long_prompts": ["compiled", "threads", "free-threads"],
    "real": ["bf16", "bfloat16", "bfloat16-free"],
    "real_defaults": ["defaults", "as-configured"],
}
"""Fastest settings of TRL and of each way of Tiller, by kind of work. Two are equally fast on
``uniform`` work for TRL, and two in lockstep."""
WAY_OF = {name: way for way, settings in WAYS.items() for name in settings}


@dataclass(frozen=True)
class Turn:
    """Work of a side in one turn, in the steps that count."""

    seconds: float
    tokens: float
    cpu_s: float
    steps: int
    equal: float = 0.0
    """Share of the groups, of all steps, whose rewards are equal."""

    @classmethod
    def of(
        cls,
        seconds: Sequence[float],
        tokens: Sequence[float],
        cpu_s: float,
        *,
        warm_up: int,
        equal: float = 0.0,
    ) -> "Turn":
        """Return the turn with these values of all its steps, of which the first ``warm_up`` and
        the last one do not count.
        """
        counted = slice(warm_up, -1)
        timed = seconds[counted]
        return cls(sum(timed), sum(tokens[counted]), cpu_s, len(timed), equal)

    @property
    def per_s(self) -> float:
        """Trained tokens per second."""
        return self.tokens / self.seconds

    @property
    def per_cpu_s(self) -> float:
        """Trained tokens per CPU second."""
        return self.tokens / self.cpu_s


def trl_python(folder: Path) -> Path:
    """Return the interpreter of TRL's environment: see package_env.py."""
    return environment_python(folder, PINNED, name="against_trl: TRL")


def write_model(folder: Path, fields: dict[str, Any] = MODEL, ends: bool = False) -> None:
    """Write random weights, and a tokenizer whose vocabulary has the size of the model's. With
    ``ends``, the logit of the token END is 0.
    """
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
    model = Qwen3ForCausalLM(Qwen3Config(**hf_config(shape_of(ModelConfig(**fields)))))
    if ends:
        model.lm_head.weight.data[END] = 0.0
    model.save_pretrained(folder)
    vocabulary = {f"w{token}": token for token in range(fields["vocab_size"])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder)


def run_trl(
    python: Path, kind: str, setting: Setting, model: Path, steps: int, folder: Path
) -> Turn:
    """Return TRL's turn of so many ``steps`` that count; its files begin with the name
    ``folder``.
    """
    from rl.host.platform import thread_variables

    warm_up = WORKS[kind].warm_up
    path, progress = folder.with_suffix(".json"), folder.with_suffix(".progress")
    last = warm_up + steps
    given = {
        "kind": kind,
        "model": str(model),
        "problems": str(folder.parent / "train.jsonl"),
        "steps": last + 1,
        "progress": str(progress),
        "passes": setting.passes,
        "options": setting.options,
    }
    path.write_text(json.dumps(given))
    processes = setting.processes
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    out, cpu_s = run_watched(
        [python, *(launcher if processes > 1 else []), HERE / "grpo_trl.py", path],
        progress,
        (warm_up, last),
        **thread_variables(max(1, CORES // processes)),
    )
    found = json.loads(out.splitlines()[-1])
    equal = statistics.mean(found["equal"])
    return Turn.of(found["seconds"], found["tokens"], cpu_s, warm_up=warm_up, equal=equal)


def run_ours(kind: str, model: Path, steps: int, folder: Path, *overrides: str) -> Turn:
    """Return Tiller's turn of so many ``steps`` that count, a run in ``folder``."""
    work = WORKS[kind]
    last = work.warm_up + steps
    fields = {"--model.hf_path": model, "--steps": str(last + 1), "--output-dir": folder}
    if work.published:
        fields["--task.path"] = folder.parent / "train.jsonl"
    options = [word for pair in fields.items() for word in pair]
    config = ["--config", f"grpo_ours.{kind}"]
    _, cpu_s = run_watched(
        [sys.executable, "-m", "rl.train", *config, *options, *overrides],
        folder / "metrics.jsonl",
        (work.warm_up, last),
        PYTHONPATH=os.pathsep.join(map(str, (ROOT, HERE))),
    )
    rows = rows_of(folder / "metrics.jsonl")
    lengths = [row["completion/length_mean"] for row in rows]
    assert work.ends or {*lengths} == {work.new_tokens}, f"completions of {lengths} tokens"
    tokens = [length * work.prompts * work.samples for length in lengths]
    seconds = [row["timing/step"] for row in rows]
    equal = statistics.mean(row["reward/zero_std_groups"] for row in rows)
    return Turn.of(seconds, tokens, cpu_s, warm_up=work.warm_up, equal=equal)


def compare(
    python: Path, kind: str, settings: Sequence[str], rounds: int, steps: int, folder: Path
) -> dict[str, Any]:
    """Measure all sides of a kind of work alternately; return the result of ``result_of``."""
    folder.mkdir()
    model = folder / "model"
    if WORKS[kind].published:
        real_model.main([str(model), "--problems", str(folder)])
    else:
        write_model(model, WORKS[kind].model, ends=WORKS[kind].ends)
    turns: dict[str, list[Turn]] = {}
    for number in range(rounds):
        for name in settings:
            own = folder / f"{name}-{number}"
            if name in WAY_OF:
                turn = run_ours(kind, model, steps, own, *WAYS[WAY_OF[name]][name])
            else:
                turn = run_trl(python, kind, SETTINGS[name], model, steps, own)
            turns.setdefault(name, []).append(turn)
            line = f"{turn.per_s:7.0f} tokens/s {turn.per_cpu_s:7.0f} tokens/CPU-s"
            step = f"{turn.seconds / turn.steps:.3f} s a step"
            print(f"{kind}, round {number + 1}: {name:20} {line} {step}", flush=True)
    return result_of(turns, WORKS[kind].prompts * WORKS[kind].samples)


def result_of(turns: dict[str, list[Turn]], completions: int) -> dict[str, Any]:
    """Return the medians of the rounds' ratios by way, and their extremes. Of several settings of
    TRL, or of a way, the fastest of a round counts. A step has so many ``completions``.

    Raises SystemExit if the sides trained completions of different lengths.
    """
    sides: dict[str, list[list[Turn]]] = {"trl": [], **{way: [] for way in WAYS}}
    for name, each in turns.items():
        sides[WAY_OF.get(name, "trl")].append(each)
    fastest = {
        side: [max(of_round, key=lambda turn: turn.per_s) for of_round in zip(*each, strict=True)]
        for side, each in sides.items()
        if each
    }
    trl = fastest.pop("trl")
    ratios: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for way, own in fastest.items():
        ratios[way] = [a.per_s / b.per_s for a, b in zip(own, trl, strict=True)]
        cpu[way] = [a.per_cpu_s / b.per_cpu_s for a, b in zip(own, trl, strict=True)]
    lengths = {
        name: statistics.mean(turn.tokens / (turn.steps * completions) for turn in each)
        for name, each in turns.items()
    }
    if max(lengths.values()) > (1 + MAX_DIFFERENCE) * min(lengths.values()):
        raise SystemExit(f"against_trl: the sides' completions have different lengths: {lengths}")
    return {
        **{name: statistics.median(values) for name, values in ratios.items()},
        "spread": {name: [min(values), max(values)] for name, values in ratios.items()},
        "cpu": {name: statistics.median(values) for name, values in cpu.items()},
        "tokens_per_s": {
            name: statistics.median(turn.per_s for turn in each) for name, each in turns.items()
        },
        "seconds_per_step": {
            name: statistics.median(turn.seconds / turn.steps for turn in each)
            for name, each in turns.items()
        },
        "mean_length": lengths,
        "equal_groups": {
            name: statistics.mean(turn.equal for turn in each) for name, each in turns.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made = [kind for kind, work in WORKS.items() if not work.published]
    parser.add_argument("--only", nargs="+", choices=WORKS, default=made, help="kinds of work")
    parser.add_argument("--rounds", type=int, default=7, help="turns that each side takes")
    parser.add_argument("--steps", type=int, default=16, help="steps of each turn that count")
    names = [*SETTINGS, *WAY_OF]
    text = "settings of TRL and of Tiller (default: the fastest for each kind of work)"
    parser.add_argument("--settings", nargs="+", choices=names, help=text)
    parser.add_argument("--trl-env", type=Path, default=TRL_ENV, help="TRL's environment")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.settings and {*arguments.settings}.isdisjoint(SETTINGS):
        parser.error("--settings: name one of TRL too")
    if arguments.steps < 1:
        parser.error(f"--steps: {arguments.steps} is no number of steps that count; give 1 or more")
    python = trl_python(arguments.trl_env.expanduser())
    print(f"{CORES} cores, {PINNED[0]}")
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments.only:
            settings = arguments.settings or BEST[kind]
            sizes = arguments.rounds, arguments.steps
            result[kind] = found = compare(python, kind, settings, *sizes, Path(folder, kind))
            ways = (f"{way} {found[way]:.2f}" for way in WAYS if way in found)
            print(f"{kind}: over TRL {', '.join(ways)}", flush=True)
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
