"""Rehearsal of one role: the real engine takes two steps on a fake device."""

import dataclasses
import os
import resource
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch

import rl.training.model as model_module
from rl.compat import fake_flex
from rl.compat.fake_cuda import pretend
from rl.compat.titan import tell_device
from rl.compat.torch_internals import local_tensor
from rl.errors import require
from rl.plan.rehearsal.batches import Work, work_of
from rl.plan.rehearsal.device import FakeCuda
from rl.plan.rehearsal.ledger import Ledger
from rl.plan.setting import LEARNING, Setting, seat_of
from rl.session.config import Role
from rl.training.engine import TrainingEngine

STEPS = 2
GIB = 1 << 30
CARDS = {
    "a100": ("NVIDIA A100-SXM4-80GB", (8, 0)),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0)),
    "h200": ("NVIDIA H200", (9, 0)),
    "b200": ("NVIDIA B200", (10, 0)),
}
"""Name that the driver gives, and compute capability."""
ASSUMED = (
    "collectives do nothing, and ranks wait for no other rank",
    "initial weights are not drawn",
    "flex attention keeps queries, keys, values, its result and float32 sums of rows",
)


def fake_device(setting: Setting) -> FakeCuda:
    """Return the GPU of the setting's hardware, which torch believes in from now on."""
    name, capability = CARDS[setting.hardware.device]
    bytes = int(setting.device.memory_gib * GIB)
    device = FakeCuda(name, bytes, capability, setting.hardware.gpus)
    pretend(device)
    tell_device("cuda", torch.cuda)
    fake_flex.use_stand_ins()
    draw = model_module.titan.initializers

    def without_numbers(module: Any) -> dict[str, Any]:
        return {name: lambda tensor: None for name in draw(module)}

    model_module.titan.initializers = without_numbers  # draws the whole model: minutes for 8B
    return device


def rehearse(device: FakeCuda, setting: Setting, name: str, rank: int) -> dict[str, Any]:
    """Return what rank ``rank`` of role ``name`` does in two steps, as JSON-able data with sizes in
    bytes. An error of the engine is under ``error``.
    """
    device.ledger = ledger = Ledger()
    role = setting.roles[name]
    began = time.monotonic()
    error = None
    kept: dict[str, int] = {}
    with device, tempfile.TemporaryDirectory() as folder:
        work = work_of(setting, name)
        engine = None
        try:
            engine = _engine(setting, name, rank, folder)
            kept = _two_steps(device, engine, work, learns=name in LEARNING)
            if len(setting.shared) > 1 and name in setting.shared:
                _take_turns(ledger, engine)
        except Exception as raised:
            error = f"{ledger.phase}: {type(raised).__name__}: {raised}"
        finally:
            ledger.end()
            if engine is not None:
                engine.close()
    return {
        "role": name,
        "rank": rank,
        "ranks": role.trainer.ranks,
        "error": error,
        "peak": ledger.peak,
        "kept": kept,
        "seconds": time.monotonic() - began,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **_entries(ledger),
    }


def _engine(setting: Setting, name: str, rank: int, folder: str) -> TrainingEngine:
    role: Role = setting.roles[name]
    require(
        not role.trainer.compile.enable,
        "trainer.compile.enable is True; --rehearse cannot run compiled code: add "
        "--trainer.compile.no-enable",
    )
    place = setting.places[name]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % place.per_host),
        "WORLD_SIZE": str(place.ranks),
        "NGPU": str(place.ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",  # the fake process group connects to nothing
    }
    comm = dataclasses.replace(role.trainer.comm, mode="fake_backend")
    trainer = dataclasses.replace(role.trainer, comm=comm)
    steps = 10 * STEPS
    return TrainingEngine(
        trainer, role.model, head=role.head, seed=0, steps=steps, folder=folder
    )


def _two_steps(
    device: FakeCuda, engine: TrainingEngine, work: Work, *, learns: bool
) -> dict[str, int]:
    """Run two steps of ``work`` and return the bytes that the rank keeps, by purpose."""
    ledger = device.ledger
    gradients: set[int | None] = set()
    for step in range(1, 1 + STEPS):
        if work.forward:
            ledger.begin(f"forward {step}")
            engine.forward(work.batch, temperature=work.temperature)
        if learns:
            ledger.begin(f"forward_backward {step}")
            engine.forward_backward(work.batch, work.loss, temperature=work.temperature)
            trained = [each.grad for each in engine.model.parameters() if each.grad is not None]
            gradients = {device.number(local_tensor(each)) for each in trained}
            sizes = {"gradients": _size(ledger, gradients)}
            ledger.begin(f"optim_step {step}")
            engine.optim_step(denominator=work.denominator)
    states = [state for each in engine.optimizers for state in each.state.values()]
    tensors = {
        "parameters": [*engine.model.parameters()],
        "optimizer states": [each for state in states for each in state.values() if each.dim()],
        "buffers": [*engine.model.buffers()],
    }
    kept = {
        name: _size(ledger, {device.number(local_tensor(each)) for each in found})
        for name, found in tensors.items()
    }
    return kept | (sizes if learns else {})


def _size(ledger: Ledger, keys: set[int | None]) -> int:
    return sum(ledger.live[key].bytes for key in keys if key in ledger.live)


def _take_turns(ledger: Ledger, engine: TrainingEngine) -> None:
    ledger.begin("offload")
    engine.offload()
    ledger.begin("onload")
    engine.onload()


def _entries(ledger: Ledger) -> dict[str, Any]:
    """Return the ledger as lists of rows, largest first."""
    largest: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for each in ledger.at_peak.values():
        entry = largest[each.phase, each.operator, each.line]
        entry[0] += each.bytes
        entry[1] += 1
    rows = sorted(largest.items(), key=lambda item: -item[1][0])
    return {
        "phases": [
            {"phase": phase, "peak": peak, "after": ledger.after.get(phase, 0)}
            for phase, peak in ledger.peaks.items()
        ],
        "largest": [
            {"bytes": bytes, "count": count, "phase": phase, "operator": operator, "line": line}
            for (phase, operator, line), (bytes, count) in rows[:20]
        ],
        "collectives": [
            {"phase": phase, "kind": kind, "line": line, "count": count, "bytes": bytes}
            for (phase, kind, line), bytes in ledger.moved.most_common()
            for count in [ledger.calls[phase, kind, line]]
        ],
        "syncs": [
            {"phase": phase, "reason": reason, "line": line, "count": count}
            for (phase, reason, line), count in ledger.syncs.most_common()
        ],
        "assumed": [*ASSUMED, *ledger.assumed],
    }
