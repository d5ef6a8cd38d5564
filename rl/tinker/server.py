"""A server's parts, and its life: the session runs, and what was lost starts again."""

import asyncio
from pathlib import Path
from typing import Any

from rl.config.serve import ServeConfig
from rl.errors import ActorFailure
from rl.observe.events import Events
from rl.session.concurrency import background
from rl.session.session import Session
from rl.tinker.models import Models
from rl.tinker.parts import Parts
from rl.tinker.samplers import Samplers

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
        self, config: ServeConfig, session: Session, folder: Path, events: Events, **options: Any
    ):
        """``options`` are those of :class:`Parts`."""
        self.names = [*config.offered()]
        self.parts = Parts(config, session, folder, events, **options)
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
                    await self.models.note_loss()
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
