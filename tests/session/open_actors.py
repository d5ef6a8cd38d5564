"""Actors that also return their parameters, and push with faults, for tests."""

import asyncio
import gc
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl.actors.endpoint import endpoint
from rl.actors.generator import Generator
from rl.actors.policy_trainer import PolicyTrainer
from rl.model.shards import Box, Shard
from rl.types import Batch
from rl.weights.transport import Sent


class OpenTrainer(PolicyTrainer):
    @endpoint
    async def shards(self) -> list[Shard]:
        shards = (await self._in_engine(self.engine.shards)).values()
        return [shard._replace(tensor=shard.tensor.clone()) for shard in shards]

    @endpoint
    async def collective_timeout(self) -> float:
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    @endpoint
    async def watch_payloads(self) -> None:
        """Record the number of tokens of each later message to this rank."""
        self._payloads: list[int] = []
        share_out = self.engine.from_leader

        def noted(batch: Batch | None) -> Batch:
            self._payloads.append(0 if batch is None else len(batch.tokens))
            return share_out(batch)

        self.engine.from_leader = noted

    @endpoint
    async def watch_collections(self) -> None:
        """Record the generation of each later garbage collection in this process."""
        self._collections: list[int] = []

        def noted(phase: str, info: dict[str, int]) -> None:
            if phase == "stop":
                self._collections.append(info["generation"])

        gc.callbacks.append(noted)

    @endpoint
    async def collections(self) -> list[int]:
        return self._collections

    @endpoint
    async def payloads(self) -> list[int]:
        return self._payloads

    @endpoint
    async def skip(self, name: str = "") -> None:
        """Always publish the current values of ``name``, or of all parameters."""
        for place, region in enumerate(self.publisher.address.layout):
            if name in ("", region.name):
                self.publisher._tensors[place] = self.publisher._tensors[place].clone()

    @endpoint
    async def publish_only_behind(self, method: str, wait_s: float) -> None:
        """Have publish return after the engine's next ``method``, which waits for it to begin."""
        began = threading.Event()
        over = threading.Event()
        publish = self.publisher.publish
        run = getattr(self.engine, method)

        async def behind(version: int) -> Sent:
            began.set()
            self._was_behind = await asyncio.to_thread(over.wait, wait_s)
            return await publish(version)

        def awaited(*args: Any, **options: Any) -> Any:
            assert began.wait(wait_s), f"{method} was over before publish began"
            answer = run(*args, **options)
            over.set()
            return answer

        self.publisher.publish = behind
        setattr(self.engine, method, awaited)

    @endpoint
    async def was_behind(self) -> bool:
        """Return whether publish outlasted the method; undo ``publish_only_behind``."""
        for name in ("forward_backward", "optim_step"):
            self.engine.__dict__.pop(name, None)
        del self.publisher.publish
        return self._was_behind

    @endpoint
    async def change(self, change: Any) -> None:
        """Call ``change(engine)``, between two calls of the engine."""
        await self._in_engine(lambda: change(self.engine))

    @endpoint
    async def segments(self) -> int:
        return held_segments()


class OpenGenerator(Generator):
    @endpoint
    async def shards(self) -> list[Shard]:
        shards = await self._loop.run_between_steps(lambda engine: engine.parameters())
        return [shard._replace(tensor=shard.tensor.clone()) for shard in shards]

    @endpoint
    async def collective_timeout(self) -> float:
        def ask(engine: Any) -> float:
            return engine._engine.vllm_config.parallel_config.cpu_distributed_timeout_seconds

        return await self._loop.run_between_steps(ask)

    @endpoint
    async def cross(self, one: str, other: str) -> None:
        """Swap the slices of two parameters in later pulls."""
        shards = await self._loop.run_between_steps(lambda engine: engine.parameters())
        names = {shard.tensor.untyped_storage().data_ptr(): shard.name for shard in shards}
        for copies in self._subscriber._copies.values():
            places = {
                names[destination.untyped_storage().data_ptr()]: i
                for i, (destination, _) in enumerate(copies)
            }
            if {one, other} <= places.keys():
                i = places[one]
                j = places[other]
                (to_one, from_one) = copies[i]
                (to_other, from_other) = copies[j]
                copies[i] = (to_one, from_other)
                copies[j] = (to_other, from_one)

    @endpoint
    async def honour_reset(self, really: bool) -> None:
        """Set whether later resets of vLLM's prefix cache have an effect."""

        def patch(engine: Any) -> None:
            if really:
                del engine._engine.reset_prefix_cache
            else:
                engine._engine.reset_prefix_cache = lambda **_: True

        await self._loop.run_between_steps(patch)

    @endpoint
    async def change(self, change: Any) -> None:
        """Call ``change(engine)``, between two steps."""
        await self._loop.run_between_steps(change)

    @endpoint
    async def cached_blocks(self) -> int:
        def count(engine: Any) -> int:
            manager = engine._engine.engine_core.engine_core.scheduler.kv_cache_manager
            return len(manager.block_pool.cached_block_hash_to_block)

        return await self._loop.run_between_steps(count)

    @endpoint
    async def segments(self) -> int:
        return held_segments()


def held_segments() -> int:
    """Return the number of mappings and open files of push slots in this process."""
    opened = [os.readlink(entry) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry)]
    return sum(
        "/memfd:tiller-weights" in line
        for line in [*opened, *Path("/proc/self/maps").read_text().splitlines()]
    )


async def shards_of(mesh: Any) -> list[list[Shard]]:
    """Return every rank's parameters, by value."""
    return await mesh.call(mesh.actor.shards)


def whole(ranks: list[list[Shard]]) -> dict[str, torch.Tensor]:
    """Merge the ranks' shards; assert that every element of each parameter is held."""
    tensors: dict[str, torch.Tensor] = {}
    for shards in ranks:
        for shard in shards:
            name = shard.name
            tensor = tensors.setdefault(
                name, torch.full(shard.shape, torch.nan, dtype=shard.tensor.dtype)
            )
            place = shard.box.slices_in(Box.whole(shard.shape))
            assert_same_or_unset(name, tensor[place], shard)
            tensor[place] = shard.tensor
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    return tensors


def assert_same_or_unset(name: str, known: torch.Tensor, shard: Shard) -> None:
    unset = known.isnan()
    assert torch.equal(known.masked_fill(unset, 0), shard.tensor.masked_fill(unset, 0)), (
        f"{name}: ranks disagree"
    )
