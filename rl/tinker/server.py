"""A server's parts, and its life: the session runs, and what was lost starts again."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rl.config.serve import ServeConfig
from rl.errors import ActorFailure
from rl.observe.events import Events
from rl.session.concurrency import background
from rl.session.session import Session
from rl.tinker.models import Models
from rl.tinker.parts import Parts
from rl.tinker.samplers import UNUSED_S, Samplers

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
        self.parts.store.make_room = self.make_room
        self._began = time.monotonic()
        self._drops: dict[str, Callable[[str], object]] = {
            "session": partial(self._drop, "session"),
            "model": self.models.drop,
            "sampler": self.samplers.drop,
            "loss": partial(self._drop, "loss"),
        }

    async def run(self) -> None:
        """Run the session until the task is cancelled. Raises failures that no start repairs."""
        await self.models.load()
        await self.samplers.load()
        with contextlib.closing(self.parts.custom_losses):
            async with background(self._expire()), background(self.samplers.watch()):
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

    def finish(self, session: str) -> None:
        """Forget what only clients of a session use, which has finished: samplers, losses, and the
        states of models.
        """
        for kind in ("sampler", "loss"):
            for id in [*self.parts.store.facts[kind]]:
                if id.startswith(f"{session}:"):
                    self._drops[kind](id)
        self.models.free_finished()

    def make_room(self, kind: str) -> None:
        """Forget a tenth of the facts of a kind whose sessions have finished, or gave no sign of
        life for UNUSED_S seconds: the oldest. Models with checkpoints stay.
        """
        facts = self.parts.store.facts
        named = {fact["model"] for fact in facts["checkpoint"].values()}
        idle = time.monotonic() - UNUSED_S
        over = []
        for id in facts[kind] if kind in self._drops else ():
            session = id.partition(":")[0]
            has_ended = facts["session"].get(session, {"finished": True})["finished"]
            if id not in named and (has_ended or self.parts.heard.get(session, self._began) < idle):
                over.append(id)
        for id in over[: len(over) // 10 + 1]:
            self._drops[kind](id)

    def _drop(self, kind: str, id: str) -> None:
        self.parts.store.drop(kind, id)
        self.parts.store.forget(id)
        self.parts.heard.pop(id, None)

    async def _expire(self) -> None:
        while True:
            self.parts.checkpoints.expire()
            self.samplers.expire()
            self.models.free_finished()
            await asyncio.sleep(EXPIRE_S)
