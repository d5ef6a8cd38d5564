"""Rehearsal of one role: the real engine takes two steps on a fake device; of the generators, the
real model takes steps. The program takes the number of a rank and a config's arguments, and prints
JSON.
"""

import dataclasses
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config import CompileConfig

import rl.training.sharded_model as model_module
from rl.cli.arguments import parse_config
from rl.compat import fake_flex, fake_vllm
from rl.compat.fake_cuda import pretend
from rl.compat.titan import tell_device
from rl.compat.torch_internals import local_tensor
from rl.config import RLConfig
from rl.errors import end_program
from rl.generation.generator_config import environment
from rl.plan.memory import GIB
from rl.plan.planned_run import GENERATOR, LEARNING, PlannedRun
from rl.plan.rehearsal.device import FakeCuda
from rl.plan.rehearsal.device_ledger import Ledger, after_steps, line_of_error
from rl.plan.rehearsal.rehearsed_batches import shapes_of, work_of
from rl.training.attention import micro_batch_limits
from rl.training.engine import TrainingEngine

STEPS = 2
VARIED = 2
"""Number of varied batches that the steps of the allocator repeat."""
ALLOCATED = 40
"""Number of these steps."""
DECODED = "requests"
CARDS = {
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0)),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0)),
    "h200": ("NVIDIA H200", (9, 0)),
    "b200": ("NVIDIA B200", (10, 0)),
}
"""Name that the driver gives, and compute capability."""
ASSUMED = (
    "collectives do nothing, and no rank waits for another one",
    "no initial weights are drawn and none are read",
    "flex attention keeps queries, keys, values, its result and a float32 number for each row",
    "nothing is compiled; compiled code needs no more memory",
)
ASSUMED_OF_GENERATORS = (
    ASSUMED[0],
    "vLLM's kernels need no memory besides their results, and CUDA graphs none",
    "a generator that vLLM compiles takes the memory of an eager one",
    "sampling takes two float32 copies of the logits",
)


def fake_device(run: PlannedRun, *, generates: bool = False) -> FakeCuda:
    """Return the GPU of the run's hardware, which torch believes in from now on, and so does vLLM
    if ``generates``.
    """
    models: list[Any] = [model_module]
    if generates:
        os.environ |= environment(run.rl.generator)
        models.append(import_module("rl.generation.vllm_model"))  # vLLM as this host has it
    for module in models:
        module.use_bitwise_kernels = lambda: None
    if isinstance(run.config, RLConfig):
        import rl.trainers.algorithm  # noqa: F401 - before torch believes
    name, capability = CARDS[run.hardware.device]
    device = FakeCuda(name, int(run.device.memory_gib * GIB), capability, run.hardware.gpus)
    pretend(device)
    tell_device("cuda", torch.cuda)
    if generates:
        fake_vllm.believe(device.count)
    draw = model_module.titan.initializers

    # to draw a whole model takes minutes for 8B
    model_module.titan.initializers = lambda module: dict.fromkeys(draw(module), lambda _: None)
    return device


def rehearse(
    device: FakeCuda, run: PlannedRun, name: str, rank: int, *, allocated: int = 0
) -> dict[str, Any]:
    """Return what rank ``rank`` of role ``name`` does in its steps, as JSON-able data with sizes in
    bytes. An error of the engine is under ``error``; ``last`` are the phases of the last step.
    ``allocator`` has what torch's allocator reserves if ``allocated`` steps of a trainer follow,
    which repeat the second one or have varied batches.
    """
    device.ledger = ledger = Ledger()
    device.routes_evenly = True
    error = generator = None
    allocator: dict[str, int] = {}
    shapes: list[list[int]] = []
    kept = Kept()
    with device, tempfile.TemporaryDirectory() as folder:
        try:
            if name == GENERATOR:
                from rl.plan.rehearsal.rehearsed_generator import run_generator

                model, generator = run_generator(device, run, rank, folder)
                kept.note(device, "parameters", model.parameters())
                kept.note(device, "buffers", model.buffers())
                kept.note(device, "KV cache", [model.rehearsed_cache])
            else:
                engine = _engine(run, name, rank, folder)
                starts = _steps(device, engine, run, name, kept, varied=VARIED if allocated else 0)
                if allocated:
                    recorded = [ledger.events[start:end] for start, end in pairwise(starts[1:])]
                    first = ledger.events[: starts[STEPS]]
                    fixed = after_steps(first, recorded, allocated, expandable=False)["reserved"]
                    allocator = {"steps": allocated, "fixed": fixed}
                    allocator |= after_steps(first, recorded, allocated, expandable=True)
                trainer = run.roles[name].trainer
                shapes = shapes_of(run, trainer, micro_batch_limits(trainer, engine.model.config))
        except Exception as raised:
            sentence = str(raised).partition("\n")[0]
            where = line_of_error(raised)
            error = f"{device.ledger.phase}: {type(raised).__name__}: {sentence} ({where})"
        ledger.end()
        if dist.is_initialized():
            dist.destroy_process_group()
    return {
        "role": name,
        "rank": rank,
        "ranks": run.rehearsed[name],
        "error": error,
        "generator": generator,
        "last": [phase for phase in ledger.peaks if phase.endswith((" 2", DECODED))],
        "peak": ledger.peak,
        "kept": kept.sizes,
        "allocator": allocator,
        "shapes": shapes,
        "assumed": [*(ASSUMED if generator is None else ASSUMED_OF_GENERATORS), *ledger.assumed],
        **_entries(ledger, kept),
    }


def _engine(run: PlannedRun, name: str, rank: int, folder: str) -> TrainingEngine:
    role = run.roles[name]
    place = run.places[name]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % place.per_host),
        "WORLD_SIZE": str(place.ranks),
        "NGPU": str(place.ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",  # the fake process group connects to nothing
    }
    comm = dataclasses.replace(role.trainer.comm, mode="fake_backend")
    trainer = dataclasses.replace(role.trainer, comm=comm, compile=CompileConfig())
    steps = 10 * STEPS
    engine = TrainingEngine(
        trainer,
        role.model,
        head=role.head,
        seed=0,
        steps=steps,
        folder=folder,
        parity=run.rl.parity if isinstance(run.config, RLConfig) else "close",
    )
    fake_flex.use_stand_ins()  # in place of what the engine compiles
    return engine


def _steps(
    device: FakeCuda,
    engine: TrainingEngine,
    run: PlannedRun,
    name: str,
    kept: "Kept",
    *,
    varied: int,
) -> list[int]:
    """Run two steps of the longest sequences, and one of each of ``varied`` batches; note what the
    rank keeps. If models take turns, the engine leaves the device in the second step and returns to
    it. Return the number of events before each step, and in the end. Of steps after the second one,
    only events are recorded.
    """
    works = [work_of(run, name)] * STEPS
    works += [work_of(run, name, seed=seed) for seed in range(varied)]
    learns = name in LEARNING
    turns = len(run.shared) > 1 and name in run.shared
    ledger = device.ledger
    starts = []
    for step, work in enumerate(works, 1):
        if step == STEPS + 1:
            ledger.end()
            device.ledger = ledger = Ledger(ledger.used, live=ledger.live, events=ledger.events)
            device.routes_evenly = False
        starts.append(len(ledger.events))
        if work.forward:
            ledger.begin(f"forward {step}")
            engine.forward(work.batch, temperature=work.temperature)
        if learns:
            ledger.begin(f"forward_backward {step}")
            engine.forward_backward(work.batch, work.loss, temperature=work.temperature)
            gradients = (parameter.grad for parameter in engine.model.parameters())
            kept.note(device, "gradients", [grad for grad in gradients if grad is not None])
        if turns and step == STEPS:
            ledger.begin("offload")
            engine.offload()
            ledger.begin("onload")
            engine.onload()
        if learns:
            ledger.begin(f"optim_step {step}")
            engine.optim_step(denominator=work.denominator)
    states = [state for optimizer in engine.optimizers for state in optimizer.state.values()]
    moments = [tensor for state in states for tensor in state.values() if tensor.dim()]
    kept.note(device, "parameters", engine.model.parameters())
    kept.note(device, "optimizer states", moments)
    kept.note(device, "buffers", engine.model.buffers())
    return [*starts, len(ledger.events)]


class Kept:
    """Storages that a rank keeps from step to step, by purpose."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        """Bytes by purpose."""
        self.purposes: dict[int | None, str] = {}
        """Purpose of each of the ledger's keys."""

    def note(self, device: FakeCuda, purpose: str, tensors: Iterable[torch.Tensor]) -> None:
        """Note the storages of ``tensors``, the same ones for a purpose that is known."""
        keys = {device.number(local_tensor(tensor)) for tensor in tensors}
        live = device.ledger.live
        self.sizes[purpose] = sum(live[key].bytes for key in keys if key in live)
        self.purposes |= dict.fromkeys(keys, purpose)


def _entries(ledger: Ledger, kept: Kept) -> dict[str, Any]:
    """Return the ledger as lists of rows, largest first. ``what`` is a purpose or a phase."""
    largest: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for key, block in ledger.at_peak.items():
        purpose = kept.purposes.get(key)
        entry = largest[(purpose, "", "") if purpose else (block.phase, block.operator, block.line)]
        entry[0] += block.bytes
        entry[1] += 1
    rows = sorted(largest.items(), key=lambda item: -item[1][0])
    return {
        "phases": [
            {
                "phase": phase,
                "peak": peak,
                "after": ledger.after.get(phase, 0),
                "pinned": ledger.pinned[phase],
            }
            for phase, peak in ledger.peaks.items()
        ],
        "largest": [
            {"bytes": bytes, "count": count, "what": what, "operator": operator, "line": line}
            for (what, operator, line), (bytes, count) in rows[:20]
        ],
        "collectives": [
            row | {"count": ledger.calls[row["phase"], row["kind"], row["line"]]}
            for row in _rows(ledger.moved, "phase", "kind", "line", "bytes")
        ],
        "syncs": _rows(ledger.syncs, "phase", "reason", "line", "count"),
    }


def _rows(counts: Counter[tuple[str, str, str]], *names: str) -> list[dict[str, Any]]:
    """Return keys and numbers under ``names``, the largest number first."""
    return [dict(zip(names, (*key, number), strict=True)) for key, number in counts.most_common()]


def main(arguments: list[str]) -> int:
    """Print the rehearsal of every role that has the rank, as one line of JSON."""
    rank = int(arguments[0])
    name, config = parse_config(arguments[1:], program="python -m rl.plan")
    run = PlannedRun(config)
    roles = [mesh for mesh, ranks in run.rehearsed.items() if rank < ranks]
    device = fake_device(run, generates=GENERATOR in roles)
    rehearsed = [rehearse(device, run, role, rank, allocated=ALLOCATED) for role in roles]
    print(json.dumps({"config": name, "roles": rehearsed}))
    return 0


if __name__ == "__main__":
    end_program(main(sys.argv[1:]))
