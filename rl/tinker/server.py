"""A server's parts, and its life: the session runs, and what was lost starts again."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from rl.config.serve import ServeConfig
from rl.errors import ActorFailure
from rl.model.shape import shape_of
from rl.observe.events import Events
from rl.session.concurrency import background
from rl.session.session import Session
from rl.tinker.checkpoints import Checkpoints
from rl.tinker.forward_backward import Limits
from rl.tinker.futures import Futures
from rl.tinker.models import Models
from rl.tinker.parts import Parts
from rl.tinker.samplers import Samplers
from rl.tinker.samples import Samples
from rl.tinker.store import Store

EXPIRE_S = 60.0
"""Time between deletions of what has expired."""


class Server:
    """Server of the Tinker API, over a session that is not started. ::

        server = Server(config, session, folder, events)
        async with background(server.run()):
            await server.samplers.running.wait()
            ...     # it answers

    What clients did is in ``folder``; a server of the same folder goes on after it.
    """

    def __init__(
        self,
        config: ServeConfig,
        session: Session,
        folder: Path,
        events: Events,
        *,
        stop_token_ids: tuple[int, ...] = (),
        decode: Callable[[Sequence[int]], str] = str,
    ):
        """``decode`` makes tokens a text for people. By default the text has the numbers."""
        self.names = [*config.offered()]
        self.longest = session.config.longest_sequence
        size = shape_of(config.model).vocab_size
        most = self.longest - 1
        store = Store(folder / "server.db", events.warn)
        self.parts = Parts(
            session=session,
            store=store,
            futures=Futures(),
            checkpoints=Checkpoints(store, folder / "weights"),
            events=events,
            limits=Limits(vocab_size=size, max_tokens=most, stand_ins=config.stand_ins),
            folder=folder / "models",
            samples=Samples(folder / "models", decode),
            state_every=config.state_every,
            stop_token_ids=stop_token_ids,
        )
        self.models = Models(self.parts)
        self.samplers = Samplers(self.parts)

    async def run(self) -> None:
        """Run the session until the task is cancelled. Raises the failure that no start mends."""
        await self.models.load()
        await self.samplers.load()
        async with background(self._expire()):
            while True:
                try:
                    await self._attempt()
                except ActorFailure as failure:
                    self.parts.session.recover(failure)

    async def _attempt(self) -> None:
        """Start what does not run, and serve until a model is lost."""
        session = self.parts.session
        await session.start()
        await session.load()
        await session.connect()
        async with session.running():
            self.samplers.running.set()
            try:
                await self.models.run()
            finally:
                self.samplers.running.clear()

    async def _expire(self) -> None:
        while True:
            self.parts.checkpoints.expire()
            self.samplers.expire()
            await asyncio.sleep(EXPIRE_S)
