"""The weight push: from the trainer to every generator, checked."""

import asyncio
import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from rl.actors.generator import GeneratorMesh
from rl.actors.mesh import Rank
from rl.actors.policy_trainer import PolicyTrainer, TrainerMesh
from rl.errors import ActorFailure, NodeLost, RankLost, RunError
from rl.model.updates import Update
from rl.observe.events import Events
from rl.observe.spans import Stopwatch
from rl.session.concurrency import Signal, background
from rl.session.device_sharing import DeviceSharing
from rl.session.push_checks import LoadedVersion, PushChecks
from rl.session.session_config import SessionConfig
from rl.training.start_weights import StartWeights
from rl.training.trainer_config import Source
from rl.weights.transport import Transfer, TransferFailed, VersionGone, choose_transport

UNLIMITED = 1000
NONE = -1  # version before the first
MEMBERS = ("joining", "serving")  # states of generators that a push brings weights
RETRY_S = 1.0  # before a failed transfer is tried again; doubled each time


class Pushed(NamedTuple):
    """Weights that were pushed under a version of their own."""

    version: int = NONE
    source: Source = None
    policy: tuple[int, int] = NONE, 0
    """Version of the policy that ``source`` None stands for, and its number of loads."""


FIRST = Pushed()  # before the first version


@dataclass(slots=True)
class PushState:
    """Weights on their way to the generators, since the push was connected."""

    pending: Pushed = FIRST
    """Weights that are published next, and that the trainer keeps until then."""
    readable: Pushed = FIRST
    """Newest weights that generators can read."""
    loaded: Pushed = FIRST
    """Weights that every generator holds, or newer ones."""


@dataclass(eq=False)
class WeightPush:
    """Moves the trainer's weights to the generators: publish, pull, settle. ::

        push = WeightPush(config, trainer, devices, watch, events)
        await push.connect(generators)          # those that are joining have the trainer's weights
        async with background(push.run()):
            version = push.publish()            # copy the new weights, behind what comes next
            await push.pull(version)            # have every generator load them
            await push.settle()                 # before the weights change again

    The transport keeps the last two published versions readable. A publish waits until no generator
    fetches the older one.

    - Weights never change under a reader. ``settle`` returns if no version is left to publish and
      no comparison with the weights is left; ``publish`` follows each change.
    - With ``pushes`` in order, generators load each version, and a restarted generator can read the
      version of the others. A publish waits until the previous version has arrived, so the two
      readable versions are at most the one that arrived and the one after it.
    - With ``pushes`` "newest", a publish does not wait, and generators read the newest version,
      also if the one that they were reading is gone.
    - A transfer that failed while both ends are alive is repeated ``max_restarts`` times.
    - Each arrival is compared with the trainer's weights as configured. With ``compares_all``,
      weights change only after each generator's copy was compared with them.
    - Instead of the policy, generators can ``hold`` a snapshot or the base model. A push then has a
      version of its own, above those of the policy.
    - Without a trainer the only version is 0, which each generator loads itself.
    """

    config: SessionConfig
    trainer: TrainerMesh | None
    devices: DeviceSharing
    watch: Stopwatch
    events: Events
    state: PushState = field(default_factory=PushState, init=False)
    """A connection begins another one, so that what is left of the last one changes nothing."""
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of the last push."""

    def __post_init__(self) -> None:
        config = self.config
        generator = config.generator
        timeout_s = config.deadlines.start
        self._start = StartWeights(
            model=config.model, seed=config.seed, start=config.start, timeout_s=timeout_s
        )
        self._changed = Signal()
        self._settling = 0  # number of tasks that wait until the weights may change
        settling = partial(self._changed.until, lambda: self._settling or not self.trainer)
        weights = self.trainer or self._start
        self.checks = PushChecks(config, weights, self.devices, self.watch, settling)
        self._in_order = config.pushes == "in_order"
        self._compares = self.checks.are_on and (config.compares_all or not self._in_order)
        self._rolling = not self._in_order and bool(generator and generator.update == "rolling")
        self._unchecked: deque[LoadedVersion] = deque()
        self._generators: Collection[GeneratorMesh] = ()
        self._joining = asyncio.Lock()  # no pull while a generator joins or leaves
        # That was published last; None while its weights change, which must not be compared.
        self._policy: tuple[int, int] | None = self.present_policy
        self._transfer: Transfer | StartWeights = self._start
        self._addresses: list[Any] = []

    @property
    def max_generators(self) -> int:
        """Maximum number of generators until the transport is opened again."""
        transfer = self._transfer
        if isinstance(transfer, StartWeights) or not transfer.is_network:
            return UNLIMITED
        return transfer.generators

    async def connect(self, generators: Collection[GeneratorMesh]) -> str:
        """Open the push to ``generators``, a view of them, and bring them weights; return the plan.

        Raises ValueError, which names the parameter, if the trainer's layout does not cover the
        generators'.
        """
        self._generators = generators
        for mesh in generators:
            mesh.state = "joining"
            mesh.version = None
        self._unchecked.clear()
        self.checks.forget()
        if self.trainer is not None:
            await self._open(self.trainer)
        self.state = PushState()
        self._changed.notify()
        checks = [] if self.trainer else [self._compare_each()]
        async with background(self._publish_each(), *checks):
            await self.pull(self.publish())
        return self._transfer.describe()

    async def join(self, generator: GeneratorMesh) -> None:
        """Bring a generator that is new or was started again the weights of the others."""
        async with self._joining:
            generator.state = "joining"
            generator.version = None
            state = self.state
            await self._pull(generator, state.loaded if self._in_order else state.readable)

    async def run(self) -> None:
        """Publish versions that were started, and compare versions that have arrived."""
        async with background(self._compare_each()):
            await self._publish_each()

    def publish(self, source: Source = None) -> int:
        """Have ``run`` make the policy's weights readable, or those of ``source``, if they changed
        since the last time; return their version without waiting.
        """
        state = self.state
        policy = self.present_policy if source is None else (NONE, 0)
        if state.pending[1:] != (source, policy):
            state.pending = Pushed(max(state.pending.version + 1, policy[0]), source, policy)
        if source is None:
            self._policy = policy
        self._changed.notify()
        return state.pending.version

    @property
    def present_policy(self) -> tuple[int, int]:
        """Version and number of loads of the trainer, which tell its weights from earlier ones."""
        return (self.trainer.version, self.trainer.loads) if self.trainer else (0, 0)

    def has(self, source: Source) -> bool:
        """Whether the weights of ``source`` are those published last, and not about to change."""
        return source is not None or self._policy == self.present_policy

    async def hold(self, source: Source) -> None:
        """Have every generator load a snapshot or the base model, or with None the policy of the
        last push. Needs ``pushes`` in order.

        Raises RunError if the policy has changed since its last push, and the failure of the
        trainer if it cannot load the snapshot.
        """
        state = self.state
        await self.pull(state.pending.version)
        if source == state.loaded.source:
            return
        if not self.has(source):
            raise RunError(
                "the generators hold a snapshot, and the policy has changed since its last push: "
                "call push() before sampling from it"
            )
        if source is not None:
            assert self.trainer is not None, "a session without one has no other weights"
            await self._until_unread()
            async with self.devices.of("trainer", "model"):
                await self.trainer.call(PolicyTrainer.merge, source)  # fails here, not in ``run``
        version = self.publish(source)
        while state.loaded.version < version and state is self.state:
            await self._changed.until(
                lambda: state.readable != state.loaded or state is not self.state
            )
            await self.pull(self.state.readable.version)
        if self.state.loaded.source != source:
            raise RunError("the push was connected again while generators loaded a snapshot")

    async def pull(self, version: int) -> int:
        """Have every generator load ``version`` or a newer one; return the oldest one loaded.

        Waits until ``version`` is published.
        """
        await self._changed.until(
            lambda: self.state.readable.version >= min(version, self.state.pending.version)
        )
        async with self._joining:
            state = self.state
            if state.loaded.version >= version:
                return state.loaded.version
            wanted = state.readable

            async def pull(generator: GeneratorMesh) -> float:
                if generator.state in MEMBERS:  # it may leave during the pulls of others
                    try:
                        newest = wanted if self._in_order else state.readable
                        return await self._pull(generator, newest)
                    except RankLost as lost:
                        if lost.actor != generator.name:
                            raise
                return 0.0

            behind = [mesh for mesh in self._generators if mesh.version != wanted.version]
            with self.watch.span("push"):
                if self._rolling:
                    pauses = [await pull(mesh) for mesh in behind]
                else:
                    pauses = await asyncio.gather(*map(pull, behind))
            self.metrics["timing/push_pause"] = max(pauses, default=0.0)
            state.loaded = wanted
            self._changed.notify()
            return wanted.version

    async def settle(self) -> None:
        """Wait until nothing reads the trainer's weights, not even a check."""
        with self.watch.span("push_wait"):
            await self._until_unread()
            self._policy = None

    async def _until_unread(self) -> None:
        self._settling += 1
        self._changed.notify()

        def may_change() -> bool:
            state = self.state
            late = self._compares and state.loaded != state.pending
            return state.pending == state.readable and not late and not self._unchecked

        try:
            await self._changed.until(may_change)
        finally:
            self._settling -= 1

    async def _open(self, trainer: TrainerMesh) -> None:
        """Plan the routes and open the trainer's end of each."""
        generators = [*self._generators]
        weights = self.config.weights
        deadlines = self.config.deadlines
        async with self.devices.of("trainer", "model"):
            sources = await trainer.call(Rank.layout)
        async with self.devices.of("generator"):
            layouts = await asyncio.gather(*(mesh.call(Rank.layout) for mesh in generators))
        domains = [domain for domain, *_ in chain(sources, *layouts)]
        transfer = Transfer(
            transport=choose_transport(
                weights.transport,
                domains,
                on_gpus=self.config.hardware.kind == "cuda",
                has_rdma=all(has_rdma for _, has_rdma, _ in chain(sources, *layouts)),
            ),
            dtype=generators[0].dtype,
            sources=tuple(layout for *_, layout in sources),
            wanted=tuple(layout for *_, layout in layouts[0]),
            generators=len(generators),
            delta=weights.delta,
            fan_out=weights.fan_out,
        )
        # A reader of shared memory that hangs ends by the deadline of its call, before the trainer.
        timeout_s = deadlines.push if transfer.is_network else deadlines.call
        timeout_s += transfer.nbytes / (weights.min_gb_s * 1e9)
        self._transfer = replace(transfer, timeout_s=timeout_s)
        async with self.devices.of("trainer", "model"):
            self._addresses = await trainer.open_publishers(self._transfer)

    async def _publish_each(self) -> None:
        """Publish each version that is pending, once the older one may be overwritten."""

        def may_publish() -> bool:
            newest = self.state.readable
            if newest == self.state.pending or (self._in_order and newest != self.state.loaded):
                return False
            fetched = (mesh.fetches for mesh in self._generators if mesh.fetches is not None)
            return all(version >= newest.version for version in fetched)

        while True:
            await self._changed.until(may_publish)
            state = self.state
            pending = state.pending
            version, source, _ = pending
            if self.trainer is not None:
                async with self.devices.of("trainer", "model"):
                    with self.watch.span("push"), self.watch.span("publish", "trainer"):
                        ranks = self.trainer.on(extra_s=self._transfer.timeout_s)
                        sent = await ranks.call(PolicyTrainer.push_weights, version, source)
                    if self.devices.share("trainer", "generator"):
                        with self.watch.span("check"):
                            await self.checks.digest(version, source)
                self.metrics = {
                    "push/bytes": sum(rank_sent.bytes_full for rank_sent in sent),
                    "push/bytes_sent": sum(rank_sent.bytes_sent for rank_sent in sent),
                }
                update = Update.total(rank_sent.update for rank_sent in sent)
                if update.square:
                    self.metrics["push/update_kept"] = update.share
                self.events.emit("pushed", version=version, metrics=self.metrics)
            state.readable = pending
            self._changed.notify()

    async def _pull(self, generator: GeneratorMesh, wanted: Pushed) -> float:
        """Have a generator load weights, or newer ones; return the pause of generation, in s.

        Transfers that fail are repeated at growing intervals.
        """
        failures = 0
        async with self.devices.of("generator"):
            if generator.version is None:
                await generator.connect(self._transfer, self._addresses)
            with self.watch.span("pull", generator.name):
                while True:
                    try:
                        await self._fetch(generator, wanted.version)
                        pause = await generator.pull_weights(wanted.version)
                        break
                    except ActorFailure as failure:
                        failures += isinstance(failure.__cause__, TransferFailed)
                        wanted = await self._next(failure, wanted, failures)
                        if failures:  # not when others try, which may have failed with it
                            wait_s = RETRY_S * 2 ** (failures - 1) * random.uniform(1, 2)
                            await asyncio.sleep(wait_s)
            version = generator.version or wanted.version
            self.events.emit("arrived", process=generator.name, version=version)
            if self.checks.are_on:
                source = (wanted if version == wanted.version else self.state.readable).source
                with self.watch.span("check"):
                    self._unchecked.append(await self.checks.ask(generator, version, source))
        self._changed.notify()
        if self.trainer is None:  # the generator gets requests only if it passes
            await self._changed.until(lambda: not self._unchecked)
        return pause

    async def _fetch(self, generator: GeneratorMesh, version: int) -> None:
        generator.fetches = version
        try:
            await generator.fetch_weights(version)
        finally:
            generator.fetches = None
            self._changed.notify()

    async def _next(self, failure: ActorFailure, wanted: Pushed, failures: int) -> Pushed:
        """Return the weights to pull after a pull of ``wanted`` failed; raise if none are left.

        Raises NodeLost if transfers between living processes keep failing.
        """
        if self.trainer is not None:  # reads may fail before its death is known
            await self.trainer.check_alive()
        newest = wanted if self._in_order else self.state.readable
        if isinstance(failure.__cause__, TransferFailed):
            if failures > self.config.max_restarts:
                raise NodeLost(
                    f"{failure}\nthe transfer failed {failures} times in a row while the "
                    "trainer is alive: the network is broken or below weights.min_gb_s"
                ) from failure
        elif newest == wanted or not isinstance(failure.__cause__, VersionGone):
            raise failure
        self.events.warn(f"{str(failure).splitlines()[0]}; pulling version {newest.version}")
        return newest

    async def _compare_each(self) -> None:
        """Compare arrivals with the trainer's weights, unless the weights have changed since."""
        while True:
            await self._changed.until(lambda: self._unchecked)
            arrival = self._unchecked[0]
            if arrival.version == self.state.pending.version and self.has(arrival.source):
                await self.checks.compare(arrival, self.metrics)
            self._unchecked.popleft()
            self._changed.notify()
