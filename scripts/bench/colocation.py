"""Memory of a policy, its reference and its critic on one device: all resident at once, or one at
a time.

Usage: python scripts/bench/colocation.py [--steps N] [--json]

Three engines of one rank take PPO steps through Models, in the controller's order: log-probs of
policy and reference, values, gradients and steps of policy and critic. The benchmark counts the
bytes of parameters, gradients and optimizer states on the device after every call. Activations, of
one model at a time, come on top in both cases. "peak" is the largest sum. It is checked that both
sides end with the same weights.
"""

import argparse
import asyncio
import json
import os
import tempfile
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from ranks import on_ranks

import rl  # noqa: F401  # before anything imports torchtitan, which asks it for the device
from rl.algorithms.losses import ClippedLoss, ValueLoss
from rl.compat.torch_internals import local_tensor
from rl.model.digest import digests, merge_digests, policy_digest
from rl.model.shape import ModelConfig
from rl.session.models import Models
from rl.training.engine import TrainingEngine
from rl.training.trainer_config import TrainerConfig
from rl.types import Batch, Head

MODEL = ModelConfig(
    vocab_size=4096,
    dim=256,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    hidden_dim=768,
    max_seq_len=128,
)
ROLES: dict[str, Head] = {"trainer": "logprobs", "reference": "logprobs", "critic": "values"}


class Local:
    """Actor group with one engine in this process, which Models can call."""

    def __init__(self, head: Head, folder: str, usage: "Usage"):
        self._head = head
        self._folder = folder
        self._usage = usage
        self.is_running = False

    async def start(self) -> None:
        self.engine = TrainingEngine(
            TrainerConfig(), MODEL, head=self._head, seed=0, steps=1000, folder=self._folder
        )
        self._usage.engines.append(self.engine)
        self.is_running = True

    async def stop(self) -> None:
        pass

    async def forward(self, batch: Batch, *, temperature: float, source: None) -> Any:
        return self._usage.noted(self.engine.forward(batch, temperature=temperature))

    async def forward_backward(
        self, batch: Batch, loss: Any, *, temperature: float, weight: float, adapter: None
    ) -> Any:
        return self._usage.noted(
            self.engine.forward_backward(
                batch, loss.build(), temperature=temperature, weight=weight
            )
        )

    async def optim_step(self, *, with_digests: bool, **options: Any) -> Any:
        return self._usage.noted(self.engine.optim_step(**options))

    async def offload(self) -> None:
        self.engine.offload()

    async def onload(self, *, model: bool, optimizer: bool) -> None:
        self.engine.onload(model=model, optimizer=optimizer)


class Usage:
    """Bytes on the device after each call."""

    def __init__(self) -> None:
        self.engines: list[TrainingEngine] = []
        self.bytes: list[int] = []

    def noted(self, answer: Any) -> Any:
        self.bytes.append(sum(map(device_bytes, self.engines)))
        return answer


def device_bytes(engine: TrainingEngine) -> int:
    """Return the bytes of parameters, gradients and optimizer states."""
    parameters = list(engine.model.parameters())
    states = [
        value
        for each in engine.optimizers
        for state in each.state.values()
        for value in state.values()
    ]
    tensors = [
        *parameters,
        *(p.grad for p in parameters if p.grad is not None),
        *(s for s in states if s.dim()),
    ]
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    # some of FSDP's gradients share a storage, which is counted once
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def batch_of(seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    lengths = [64] * 16
    count = sum(lengths)
    weights = (torch.arange(count) % 64 > 16).float()
    columns = {name: torch.randn(count, generator=draw) for name in ("advantages", "returns")}
    tokens = torch.randint(MODEL.vocab_size, (count,), generator=draw)
    return Batch(
        tokens=tokens, lengths=torch.tensor(lengths), loss_weights=weights, columns=columns
    )


def train(shared: list[str], steps: int, folder: str) -> tuple[list[int], str]:
    """Return the bytes after each call, and a hash of the final weights."""
    return asyncio.run(_train(shared, steps, folder))


async def _train(shared: list[str], steps: int, folder: str) -> tuple[list[int], str]:
    usage = Usage()
    groups: dict[str, Any] = {role: Local(head, folder, usage) for role, head in ROLES.items()}
    models = Models(groups, shared)
    await models.start_models()
    losses: dict[str, Any] = {
        "trainer": ClippedLoss.Config(kl_coef=0.1),
        "critic": ValueLoss.Config(),
    }
    columns = {
        "trainer": "behaviour_logprobs",
        "reference": "reference_logprobs",
        "critic": "old_values",
    }
    for step in range(steps):
        batch = batch_of(step)
        for role, head in ROLES.items():
            outputs = await models.forward(batch, role=role)
            batch.columns[columns[role]] = outputs[head]
        for role, loss in losses.items():
            await models.forward_backward(batch, loss, role=role)
            await models.optim_step(role=role)
    for group in groups.values():
        group.engine.onload()
    found = [merge_digests([digests(group.engine.shards().values())]) for group in groups.values()]
    return usage.bytes, "".join(map(policy_digest, found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3, help="of each side")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    found = {}
    for name, shared in (("separate", []), ("colocated", list(ROLES))):
        with tempfile.TemporaryDirectory() as folder:
            (found[name],) = on_ranks(1, train, shared, arguments.steps, folder)
    assert found["separate"][1] == found["colocated"][1], "the weights differ"
    peaks = {name: max(used) for name, (used, _) in found.items()}
    for name, peak in peaks.items():
        print(f"{name:9} peak {peak / 2**20:7.1f} MiB on the device")
    result = {
        "colocated_over_separate": peaks["colocated"] / peaks["separate"],
        "peak_bytes": peaks,
    }
    print(
        f"colocated over separate {result['colocated_over_separate']:.2f}, the same weights in the "
        "end"
    )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
