"""PolicyTrainer, whose weights are pushed to generators, and the handle to its mesh."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from monarch.actor import ProcMesh

from rl.actors.endpoint import endpoint, timed
from rl.actors.hosts import Hosts
from rl.actors.processes import stop_procs
from rl.actors.worker import ModelWorker
from rl.actors.worker_group import WorkerGroup
from rl.model.updates import Update, sample
from rl.training.trainer_config import Source
from rl.types import Place
from rl.weights.transport import Publisher, Sent, Transfer, open_publisher

CLOSE_STORE_S = 10.0


class PolicyTrainer(ModelWorker):
    """One rank.

    ``forward`` and ``forward_backward`` may run during a push. Calls that change or move the
    weights wait for the push.
    """

    publisher: Publisher | None = None
    _dtype: torch.dtype  # of the generators
    _sample: torch.Tensor | None  # of the policy's weights at the push before

    @endpoint
    async def open_publisher(self, transfer: Transfer) -> Any:
        shards = await self._shards()
        await self._close_publisher()
        self.publisher = open_publisher(transfer, shards, rank=dist.get_rank())
        self._dtype, self._sample = transfer.dtype, None
        return self.publisher.address

    @endpoint
    async def push_weights(self, version: int, source: Source = None) -> Sent:
        merged = self.engine.adapters.merged
        while True:
            if merged.source != source:
                await self._in_engine(self.engine.adapters.merge, source, changes=True)
            async with self._weights:
                if merged.source != source:
                    continue  # a call merged another adapter meanwhile
                assert self.publisher is not None, "open_publisher comes first"
                self.engine.require_resident("push_weights", "model")
                begin = time.time()
                sent = await self.publisher.publish(version)
                if source is None and self._dtype != torch.float32:
                    shards = merged.shards().values()
                    before, self._sample = self._sample, sample(shard.tensor for shard in shards)
                    if before is not None:
                        sent = replace(sent, update=Update.of(before, self._sample, self._dtype))
                return timed(sent, [("publish", begin, time.time())])

    @endpoint
    async def close(self) -> None:
        await self._close_publisher()
        await self._in_engine(self.checkpointer.close)
        await self._in_engine(self.engine.close)

    async def _close_publisher(self) -> None:
        async with self._weights:
            if self.publisher is not None:
                self.publisher.close()
            self.publisher = None


@dataclass(kw_only=True, eq=False)
class TrainerMesh(WorkerGroup):
    """Worker group of the policy, which also pushes weights."""

    actor = PolicyTrainer
    _store: ProcMesh | None = field(default=None, init=False)

    async def open_publishers(self, transfer: Transfer) -> list[Any]:
        """Make each rank ready to push; return the addresses that generators connect to."""
        if transfer.transport == "torchstore" and self._store is None:
            self._store = await start_store(self.hosts)
        return await self.call(PolicyTrainer.open_publisher, transfer)

    async def stop(self) -> None:
        """End the processes, whatever they are doing. Raises nothing."""
        await super().stop()
        store = self._store
        self._store = None
        if store is not None:
            await stop_store(store)


async def start_store(hosts: Hosts) -> ProcMesh:
    """Start a process with torchstore's volume, which every rank of the run finds by name."""
    from rl.weights.store import open_store

    procs = hosts.spawn("store", Place(ranks=1), env={})
    await open_store(procs)
    return procs


async def stop_store(procs: ProcMesh) -> None:
    """End the process and drop its contents; another can be started after it."""
    from rl.weights.store import close_store

    with contextlib.suppress(Exception):  # the process has ended
        async with asyncio.timeout(CLOSE_STORE_S):
            await close_store()
    await stop_procs(procs)
