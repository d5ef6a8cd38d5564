"""The weight push: from the trainer to every generator, checked."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from rl.actors.generator import GeneratorMesh
from rl.actors.trainer import TrainerMesh
from rl.errors import ActorFailure, NodeLost, RankLost
from rl.observe.events import Events
from rl.observe.spans import Stopwatch
from rl.platform import has_rdma
from rl.session.concurrency import Signal, background
from rl.session.config import SessionConfig
from rl.session.push_checks import PushChecks
from rl.session.push_state import PushState
from rl.session.residency import Residency
from rl.types import Completion
from rl.weights.open import choose_transport
from rl.weights.transport import Transfer, TransferFailed, VersionGone

NETWORK = (
    "tcp",
    "rdma",
    "torchstore",
)  # transports whose publishers reserve a place for each reader
UNLIMITED = 1000
RETRY_S = 1.0  # before a failed transfer is tried again; doubled each time


class Arrival(NamedTuple):
    """A version that a generator has loaded, and its answer to the canary with that version."""

    generator: GeneratorMesh
    version: int
    answer: Completion | None


@dataclass(eq=False)
class WeightPush:
    """Brings the trainer's weights to the generators. ::

        push = WeightPush(config, trainer, residency, watch, events)
        await push.connect(generators)          # they have the trainer's weights
        async with background(push.run()):
            version = push.start()              # publish the new weights, behind what comes next
            await push.wait(version)            # have every generator pull them
            await push.settle()                 # before the weights change again

    - :class:`PushState` has the states and proves that weights never change under a reader.
    - A generator pulls when ``wait`` is called. If its version is gone because it was too slow, it
      pulls the newest version, unless versions come in order.
    - A transfer that failed while both ends are alive is repeated ``max_restarts`` times.
    - Each arrival is compared with the trainer's weights as configured.
    """

    config: SessionConfig
    trainer: TrainerMesh
    residency: Residency
    watch: Stopwatch
    events: Events
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of the last push."""

    def __post_init__(self) -> None:
        config = self.config
        self._checks = PushChecks(config, self.trainer, self.residency)
        generator = config.generator
        in_order = config.pushes == "in_order"
        self._rolling = generator is not None and generator.update == "rolling" and not in_order
        compares = self._checks.are_on and (config.compares_all or not in_order)
        self.state = PushState[Arrival](in_order=in_order, compares=compares)
        self._numbers: dict[GeneratorMesh, int] = {}
        self._removed: list[int] = []
        self._joining = asyncio.Lock()  # no pull while a generator joins or leaves
        self._changed = Signal()
        self._addresses: list[Any] = []

    @property
    def max_generators(self) -> int:
        """Maximum number of generators until the transport is opened again."""
        return self._transfer.generators if self._transfer.transport in NETWORK else UNLIMITED

    async def connect(self, generators: Sequence[GeneratorMesh]) -> str:
        """Open the push to ``generators`` and bring them the trainer's weights; return the plan.

        Raises ValueError, which names the parameter, if the trainer's layout does not cover the
        generators'.
        """
        self._numbers = {generator: number for number, generator in enumerate(generators)}
        self._removed = []
        self._checks.forget()
        self.state.restart(self.trainer.version)
        plan = await self._open()
        await self._publish()
        await self._bring(self.state.published)
        return plan

    async def join(self, generator: GeneratorMesh) -> None:
        """Bring a generator that is new or was started again the weights of the others."""
        async with self._joining:
            taken = self._numbers.values()
            self._numbers.setdefault(generator, min(set(range(len(taken) + 1)) - set(taken)))
            await self._connect(generator)
            await self._pull(generator, self.state.joins_at)

    def remove(self, generator: GeneratorMesh) -> None:
        """Leave a generator out until it joins again."""
        if generator in self._numbers:
            self._removed.append(self._numbers.pop(generator))
            self._changed.notify()

    async def run(self) -> None:
        """Publish versions that were started, and compare versions that have arrived."""
        async with background(self._publish_each(), self._compare_each()):
            while True:
                await self._changed.until(lambda: self._removed)
                await self.trainer.excuse(self._removed.pop())

    def start(self) -> int:
        """Request a publication of the trainer's weights if they changed; return their version
        without waiting.
        """
        self.state.begin(self.trainer.version)
        self._changed.notify()
        return self.state.begun

    async def wait(self, version: int) -> int:
        """Have every generator load ``version`` or a newer one; return the oldest one loaded.

        Waits until ``version`` was started and published.
        """
        await self._changed.until(lambda: self.state.published >= version)
        async with self._joining:
            if self.state.arrived < version:
                await self._bring(self.state.published)
        return self.state.arrived

    async def settle(self) -> None:
        """Wait until nothing reads the trainer's weights, not even a check."""
        with self.watch.span("push_wait"):
            await self._changed.until(lambda: self.state.may_change)
            self.state.changing = True

    async def _open(self) -> str:
        """Plan the routes and open both ends of each."""
        generators = list(self._numbers)
        weights = self.config.weights
        deadlines = self.config.deadlines
        async with self.residency.of("trainer", "model"):
            sources = await self.trainer.layouts()
        async with self.residency.of("generator", "model"):
            layouts = await asyncio.gather(*(generator.layouts() for generator in generators))
        domains = [domain for domain, _ in chain(sources, *layouts)]
        self._transfer = Transfer(
            transport=choose_transport(weights.transport, domains, has_rdma=has_rdma()),
            dtype=generators[0].dtype,
            sources=tuple(layout for _, layout in sources),
            wanted=tuple(layout for _, layout in layouts[0]),
            generators=len(generators),
            delta=weights.delta,
            fan_out=weights.fan_out,
        )
        # A reader of shared memory that hangs ends by the deadline of its call; the trainer waits
        # longer.
        is_network = self._transfer.transport in NETWORK
        patience = deadlines.push if is_network else deadlines.call
        patience += self._transfer.nbytes / (weights.min_gb_s * 1e9)
        self._transfer = replace(self._transfer, patience=patience)
        plan = self._transfer.describe()
        async with self.residency.of("trainer", "model"):
            self._addresses = await self.trainer.open_publishers(self._transfer)
        await asyncio.gather(*(self._connect(generator) for generator in generators))
        return plan

    async def _connect(self, generator: GeneratorMesh) -> None:
        async with self.residency.of("generator", "model"):
            number = self._numbers[generator]
            await generator.connect(self._transfer, self._addresses, generator=number)

    async def _publish_each(self) -> None:
        while True:
            await self._changed.until(lambda: self.state.may_publish)
            await self._publish()
            self.state.published = self.state.begun
            self._changed.notify()

    async def _publish(self) -> None:
        async with self.residency.of("trainer", "model"):
            with self.watch.span("push"), self.watch.span("publish", "trainer"):
                version, sent = await self.trainer.push_weights()
        self.metrics = {"push/bytes": sent.bytes_full, "push/bytes_sent": sent.bytes_sent}
        self.events.emit("pushed", version=version, metrics=self.metrics)

    async def _bring(self, version: int) -> None:
        """Have every generator pull ``version``."""
        behind = [generator for generator in self._numbers if generator.version != version]
        with self.watch.span("push"):
            if self._rolling:
                pauses = [await self._pull_or_lose(each, version) for each in behind]
            else:
                pauses = await asyncio.gather(
                    *(self._pull_or_lose(each, version) for each in behind)
                )
        self.metrics["timing/push_pause"] = max(pauses, default=0.0)
        self.state.arrived = version
        self._changed.notify()

    async def _pull_or_lose(self, generator: GeneratorMesh, version: int) -> float:
        """Like ``_pull``; return 0 if the generator is lost, since its pool starts it again."""
        if generator not in self._numbers:  # it was removed during pulls of other generators
            return 0.0
        try:
            return await self._pull(generator, version)
        except RankLost as lost:
            if lost.actor != generator.name:
                raise
            return 0.0

    async def _pull(self, generator: GeneratorMesh, version: int) -> float:
        """Bring ``version``, or a newer one; return the pause of generation, in s."""
        async with self.residency.of("generator", "model"):
            with self.watch.span("pull", generator.name):
                pause = await self._pull_or_try_again(generator, version)
            version = generator.version or version
            self.events.emit("arrived", process=generator.name, version=version)
            if self._checks.are_on:
                with self.watch.span("check"):
                    answer = await self._checks.ask(generator, version)
                self.state.unchecked.append(Arrival(generator, version, answer))
        self._changed.notify()
        return pause

    async def _pull_or_try_again(self, generator: GeneratorMesh, version: int) -> float:
        """Pull, again and at growing intervals if transfers fail; return the pause of generation,
        in s.

        Raises NodeLost if transfers between living processes keep failing.
        """
        failures = 0
        while True:
            if failures:  # at another time than other generators, which may have failed with it
                await asyncio.sleep(RETRY_S * 2 ** (failures - 1) * random.uniform(1, 2))
            try:
                return await generator.pull_weights(version)
            except RankLost:
                raise
            except ActorFailure as failure:
                # Reads from a trainer that died may fail before its death is known.
                await self.trainer.check_alive()
                newest = version if self.state.in_order else self.state.published
                if isinstance(failure.__cause__, TransferFailed):
                    failures += 1
                    if failures > self.config.max_restarts:
                        raise NodeLost(
                            f"{failure}\nthe transfer failed {failures} times in a row while the "
                            "trainer is alive: the network is broken or below weights.min_gb_s"
                        ) from failure
                elif newest == version or not isinstance(failure.__cause__, VersionGone):
                    raise
                self.events.warn(f"{str(failure).splitlines()[0]}; pulling version {newest}")
                version = newest

    async def _compare_each(self) -> None:
        """Compare arrivals with the trainer's weights, unless the weights have changed since."""
        while True:
            await self._changed.until(lambda: self.state.unchecked)
            generator, version, answer = self.state.unchecked[0]
            if version == self.trainer.version and not self.state.changing:
                with self.watch.span("check"):
                    await self._checks.compare(generator, version, answer, self.metrics)
            self.state.unchecked.popleft()
            self._changed.notify()
