"""Layouts against one rank: losses, gradients and checkpoints must agree.

Usage: python scripts/bench/layouts.py [--only NAME ...] [--family NAME] [--json]

Each row trains a tiny random model for five steps on its own ranks, which are processes of this
host: DAPO's loss with entropy bonus and KL penalty, on ragged sequences that are packed and cut
into micro-batches. The row is compared with one rank that takes one sequence at a time, in fp32 (in
float8 for the float8 row). After step 3 the row saves a checkpoint, from which another layout takes
steps 4 and 5. Exit code 1 if a row exceeds its tolerance.
"""

import argparse
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# ranks share the cores and use no GPU
os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from rl.algorithms.losses import dapo
from rl.model.families import family_named
from rl.model.shape import ModelConfig, shape_of
from rl.training.checkpoint import Checkpointer
from rl.training.engine import TrainingEngine
from rl.training.trainer_config import TrainerConfig
from rl.types import Batch

STEPS = 5
SAVED_AFTER = 3
SEQUENCES = 24
LONGEST = 48
TEMPERATURE = 0.8
LOSS = dapo(entropy_coef=0.02, kl_coef=0.05)
# 502 words over tensor parallel 2 are 251, which FSDP over 2 cuts unevenly. Float8 requires
# multiples of 16.
SIZES = {
    "vocab_size": 502,
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "hidden_dim": 176,
}
MODELS = {
    "dense": ModelConfig(**SIZES, max_seq_len=LONGEST),
    "moe": ModelConfig(
        **SIZES, max_seq_len=LONGEST, num_experts=4, experts_per_token=2, moe_hidden_dim=64
    ),
}


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The largest differences that a row may show: of a loss, of a parameter's gradient relative to
    its norm, and of a loss after the checkpoint moved.
    """

    loss: float = 1e-4
    gradient: float = 1e-5
    moved: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One row of the table."""

    degrees: dict[str, Any] = field(default_factory=dict)
    """Fields of torchtitan's ParallelismConfig."""
    trainer: dict[str, Any] = field(default_factory=lambda: {"micro_batch_tokens": 4 * LONGEST})
    """Fields of the TrainerConfig on which the numbers must not depend."""
    precision: dict[str, Any] = field(default_factory=dict)
    """Fields on which the numbers depend, also set for the layout that resumes."""
    model: str = "dense"
    family: str | None = None
    reference: str = "dense"
    moves_to: str = "1-rank"
    """Name of the layout that resumes from the checkpoint."""
    tolerance: Tolerance = Tolerance()

    @property
    def ranks(self) -> int:
        degrees = {name: value for name, value in self.degrees.items() if name.endswith("_degree")}
        # expert parallelism uses the ranks of the other dimensions
        return math.prod(degrees.values()) // degrees.get("expert_parallel_degree", 1)


ONE_BY_ONE = {"micro_batch_size": 1, "packing": False}
# One sequence at a time: sequences of one micro-batch would share the scale of activations.
FLOAT8 = {
    "float8": Float8LinearConverter.Config(emulate=True),
    "micro_batch_size": 1,
    "micro_batch_tokens": None,
}
REFERENCES = {
    "dense": Layout(trainer=ONE_BY_ONE),
    "moe": Layout(trainer=ONE_BY_ONE, model="moe"),
    "float8": Layout(precision=FLOAT8),
}
EP2 = {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}
SHARD2 = {"data_parallel_shard_degree": 2}
TP2 = {"tensor_parallel_degree": 2}
LAYOUTS = {
    "1-rank": Layout(moves_to="tp2"),
    "fsdp2": Layout(degrees=SHARD2),
    "tp2": Layout(degrees=TP2, moves_to="fsdp2"),
    "tp2-no-sp": Layout(degrees=TP2 | {"enable_sequence_parallel": False}),
    "fsdp2-tp2": Layout(degrees=SHARD2 | TP2, moves_to="tp2"),
    "hsdp2x2": Layout(degrees=SHARD2 | {"data_parallel_replicate_degree": 2}, moves_to="fsdp2"),
    "cp2": Layout(degrees={"context_parallel_degree": 2}, moves_to="fsdp2"),
    "moe-tp2": Layout(degrees=TP2, model="moe", reference="moe", moves_to="moe-ep2"),
    "moe-ep2": Layout(degrees=EP2, model="moe", reference="moe"),
    "moe-ep2-tp2": Layout(degrees=EP2 | TP2, model="moe", reference="moe", moves_to="moe-ep2"),
    "fsdp2-full-ac": Layout(degrees=SHARD2, trainer={"activation_checkpoint": FullAC.Config()}),
    "tp2-selective-ac": Layout(
        degrees=TP2, trainer={"activation_checkpoint": SelectiveAC.Config()}
    ),
    "fsdp2-compile": Layout(degrees=SHARD2, trainer={"compile": CompileConfig(enable=True)}),
    "fsdp2-bf16": Layout(
        degrees=SHARD2,
        precision={"training": TrainingConfig(mixed_precision_param="bfloat16")},
        tolerance=Tolerance(loss=1e-2, gradient=0.1, moved=1e-2),
    ),
    "fsdp2-float8": Layout(
        degrees=SHARD2,
        precision=FLOAT8,
        reference="float8",
        tolerance=Tolerance(loss=1e-3, moved=1e-3),
    ),
}
NAME_WIDTH = max(map(len, LAYOUTS))
COLUMNS = {
    "layout": NAME_WIDTH,
    "ranks": 5,
    "Δ loss": 7,
    "worst gradient": 14,
    "whole gradient": 14,
    "moved to": NAME_WIDTH,
    "Δ loss there": 12,
    "within tolerance": 16,
}


def main() -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=LAYOUTS, metavar="NAME", help=f"of {', '.join(LAYOUTS)}"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument(
        "--family",
        help="family of the models without experts, default qwen3; a family with experts is that "
        "of all rows except for the compiled one and bfloat16",
    )
    arguments = parser.parse_args()
    mixture = arguments.family is not None and family_named(arguments.family).has_experts
    if mixture:
        del LAYOUTS["fsdp2-compile"]  # torchtitan compiles experts only if they are divided
        del LAYOUTS["fsdp2-bf16"]  # a rounded router chooses other experts for some tokens
    model = replace(MODELS["moe" if mixture else "dense"], family=arguments.family)
    if shape_of(model).layers_with_delta_rule:
        del LAYOUTS["cp2"]  # the state is that of a whole sequence
    for table in (REFERENCES, LAYOUTS):
        for name, layout in table.items():
            if mixture or layout.model == "dense":
                model = "moe" if mixture else "dense"
                table[name] = replace(layout, family=arguments.family, model=model)
    print("| " + " | ".join(f"{title:<{width}}" for title, width in COLUMNS.items()) + " |")
    print("|" + "|".join("-" * (width + 2) for width in COLUMNS.values()) + "|")
    with tempfile.TemporaryDirectory() as folder:
        rows = [run_row(name, folder) for name in arguments.only or LAYOUTS]
    if arguments.json:
        exact = [row for row in rows if row["tolerance"] == asdict(Tolerance())]
        largest = {
            key: max((row[key] for row in exact), default=None)
            for key in ("loss_delta", "grad_error")
        }
        print(
            json.dumps({**{f"max_{key}": value for key, value in largest.items()}, "layouts": rows})
        )
    return 0 if all(row["ok"] for row in rows) else 1


def run_row(name: str, folder: str) -> dict[str, Any]:
    """Run one row, and print it as its numbers come."""
    layout = LAYOUTS[name]
    limits = LAYOUTS[name].tolerance
    show("layout", name)
    show("ranks", layout.ranks)
    wanted, origin = reference(layout.reference, folder)
    mine = f"{folder}/{name}"
    os.mkdir(mine)
    losses = on_ranks(layout.ranks, play, layout, mine)[0]
    worst, whole = on_ranks(1, gradient_errors, mine, origin)[0]
    delta = largest_difference(losses, wanted)
    show("Δ loss", f"{delta:.1e}")
    show("worst gradient", f"{worst:.1e}")
    show("whole gradient", f"{whole:.1e}")
    target = LAYOUTS[layout.moves_to]
    target = replace(layout, degrees=target.degrees, trainer=Layout().trainer)
    moved = on_ranks(target.ranks, go_on, target, mine)[0]
    moved_delta = largest_difference(moved, losses[SAVED_AFTER:])
    ok = delta <= limits.loss and worst <= limits.gradient and moved_delta <= limits.moved
    show("moved to", layout.moves_to)
    show("Δ loss there", f"{moved_delta:.1e}")
    show("within tolerance", "yes" if ok else "NO")
    print("|")
    return {
        "name": name,
        "ranks": layout.ranks,
        "loss_delta": delta,
        "grad_error": worst,
        "whole_grad_error": whole,
        "moved_to": layout.moves_to,
        "moved_loss_delta": moved_delta,
        "tolerance": asdict(limits),
        "ok": ok,
    }


def show(column: str, value: object) -> None:
    print(f"| {value:<{COLUMNS[column]}} ", end="", flush=True)


def reference(name: str, folder: str) -> tuple[list[float], str]:
    """Return the losses of a reference and the folder of its gradients. Run each reference once."""
    path = Path(folder) / f"reference-{name}"
    if not path.exists():
        path.mkdir()
        (losses,) = on_ranks(1, play, REFERENCES[name], str(path))
        (path / "losses.json").write_text(json.dumps(losses))
    return json.loads((path / "losses.json").read_text()), str(path)


def play(layout: Layout, folder: str) -> list[float]:
    """Return the losses of five steps. Writes the first gradient and a checkpoint to ``folder``.

    Runs on each rank.
    """
    engine, checkpointer = start(layout, folder)
    losses = []
    for step in range(1, STEPS + 1):
        losses.append(accumulate(engine, step))
        if step == 1:
            save_gradients(engine, f"{folder}/gradients.pt")
        engine.optim_step()
        if step == SAVED_AFTER:
            checkpointer.save(step, {})
    checkpointer.close()
    engine.close()
    return losses


def go_on(layout: Layout, folder: str) -> list[float]:
    """Return the losses of the steps after the checkpoint in ``folder``. Runs on each rank."""
    engine, checkpointer = start(layout, folder)
    checkpointer.load()
    losses = []
    for step in range(SAVED_AFTER + 1, STEPS + 1):
        losses.append(accumulate(engine, step))
        engine.optim_step()
    checkpointer.close()
    engine.close()
    return losses


def start(layout: Layout, folder: str) -> tuple[TrainingEngine, Checkpointer]:
    config = TrainerConfig(
        parallelism=ParallelismConfig(
            **{"data_parallel_shard_degree": 1, "spmd_backend": "partial_dtensor", **layout.degrees}
        ),
        optimizer=default_adamw(lr=3e-3, weight_decay=0.1),
        **(layout.trainer | layout.precision),
    )
    model = replace(MODELS[layout.model], family=layout.family)
    engine = TrainingEngine(config, model, seed=0, steps=STEPS, folder=folder)
    return engine, Checkpointer(engine, model, folder=folder)


def accumulate(engine: TrainingEngine, step: int) -> float:
    """Add the gradient of the step's batch; returns its mean loss."""
    batch = ragged_batch(step, engine.model.config.vocab_size)
    mine = batch.select(batch.shares(engine.dp_degree)[engine.dp_rank])
    _, metrics = engine.forward_backward(mine, LOSS.build(), temperature=TEMPERATURE)
    return metrics["loss/mean"]


def ragged_batch(seed: int, vocab_size: int) -> Batch:
    """Return sequences of 2 to LONGEST tokens. The first third of each is a prompt. Some ratios are
    clipped.
    """
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, LONGEST + 1, (SEQUENCES,), generator=draw)
    owner = torch.repeat_interleave(torch.arange(SEQUENCES), lengths)
    place = torch.cat([torch.arange(int(length)) for length in lengths])
    total = len(owner)
    uniform = -math.log(vocab_size)
    return Batch(
        tokens=torch.randint(vocab_size, (total,), generator=draw),
        lengths=lengths,
        loss_weights=(place >= lengths[owner] // 3 + 1).float(),
        columns={
            "advantages": torch.randn(SEQUENCES, generator=draw)[owner],
            "behaviour_logprobs": uniform + 0.3 * torch.randn(total, generator=draw),
            "reference_logprobs": uniform + 0.3 * torch.randn(total, generator=draw),
        },
    )


def save_gradients(engine: TrainingEngine, path: str) -> None:
    """Write the whole gradient of every parameter, by name."""
    gradients = {}
    for name, parameter in engine.model.named_parameters():
        gradient = parameter.grad
        gradients[canonical_fqn(name)] = (
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        )
    if dist.get_rank() == 0:
        torch.save(gradients, path)


def gradient_errors(folder: str, origin: str) -> tuple[float, float]:
    """Return the distance of the gradients in ``folder`` from those in ``origin``, over the norm of
    the latter: the largest of any parameter, and that of all as one vector.
    """
    mine = torch.load(f"{folder}/gradients.pt")
    wanted = torch.load(f"{origin}/gradients.pt")
    assert mine.keys() == wanted.keys()
    distances = torch.stack([(mine[name] - wanted[name]).norm() for name in wanted])
    norms = torch.stack([gradient.norm() for gradient in wanted.values()])
    return float((distances / norms).max()), float(distances.norm() / norms.norm())


def largest_difference(values: list[float], wanted: list[float]) -> float:
    """Return the largest difference; NaN if any number is NaN."""
    differences = [abs(a - b) for a, b in zip(values, wanted, strict=True)]
    return max(differences, key=lambda difference: (math.isnan(difference), difference))


if __name__ == "__main__":
    raise SystemExit(main())
