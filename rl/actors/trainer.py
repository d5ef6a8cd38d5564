"""PolicyTrainer: the worker whose weights are pushed to generators, and the controller's handle to
its mesh.
"""

from typing import Any

from monarch.actor import concurrent_endpoint

from rl.actors.store import StoreProcess
from rl.actors.worker import ModelWorker, WorkerGroup
from rl.model.shards import Layout, layout_of
from rl.platform import memory_domain
from rl.weights.open import open_publisher
from rl.weights.transport import Publisher, Sent, Transfer


class PolicyTrainer(ModelWorker):
    """One rank.

    A push runs behind whatever the engine does next, and keeps the weights as they are.
    """

    publisher: Publisher | None = None

    @concurrent_endpoint
    async def layout(self) -> tuple[str, Layout]:
        return memory_domain(), layout_of((await self._in_engine(self.engine.shards)).values())

    @concurrent_endpoint
    async def open_publisher(self, transfer: Transfer, rank: int) -> Any:
        shards = list((await self._in_engine(self.engine.shards)).values())
        await self._close_publisher()
        self.publisher = open_publisher(transfer, shards, rank=rank)
        return self.publisher.address

    @concurrent_endpoint
    async def push_weights(self) -> tuple[int, Sent]:
        async with self._weights:
            assert self.publisher is not None, "open_publisher comes first"
            self.engine.require_resident("push_weights", "model")
            version = self.engine.version
            return version, await self.publisher.publish(version)

    @concurrent_endpoint
    async def excuse(self, generator: int) -> None:
        if self.publisher is not None:
            self.publisher.excuse(generator)

    @concurrent_endpoint
    async def close(self) -> None:
        await self._close_publisher()
        await self._in_engine(self._close)

    async def _close_publisher(self) -> None:
        async with self._weights:
            if self.publisher is not None:
                self.publisher.close()
            self.publisher = None


class TrainerMesh(WorkerGroup):
    """The policy's worker group, which also pushes weights."""

    actor = PolicyTrainer
    _store: StoreProcess | None = None
    _patience = 0.0

    async def layouts(self) -> list[tuple[str, Layout]]:
        """Each rank's memory domain, and what it holds of the parameters."""
        return await self.call("layout")

    async def open_publishers(self, transfer: Transfer) -> list[Any]:
        """Make each rank ready to push; the addresses that generators connect to."""
        if transfer.transport == "torchstore" and self._store is None:
            self._store = await StoreProcess.start(self._supervisor.hosts)
        self._patience = transfer.patience
        arguments = {rank: (transfer, rank) for rank in range(self._config.ranks)}
        return await self._group.call_each(
            "open_publisher", arguments, deadline=self._deadlines.call
        )

    async def push_weights(self) -> tuple[int, Sent]:
        """Make the current weights readable; their version, and the bytes of all ranks.

        It runs behind ``forward`` and ``forward_backward`` that are called meanwhile; what changes
        or moves the weights waits for it.
        """
        deadline = self._deadlines.call + self._patience
        answers = await self._group.call("push_weights", deadline=deadline)
        sent = [sent for _, sent in answers]
        return answers[0][0], Sent(sum(s.bytes_full for s in sent), sum(s.bytes_sent for s in sent))

    async def excuse(self, generator: int) -> None:
        """Have no push wait for generator number ``generator``, which has gone."""
        await self.call("excuse", generator)

    async def stop(self) -> None:
        """End the processes, whatever they are doing. Raises nothing."""
        await super().stop()
        store = self._store
        self._store = None
        if store is not None:
            await store.stop()
