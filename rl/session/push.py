"""The weight push: from the trainer to every generator, checked."""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from rl.actors.generator import GeneratorMesh
from rl.actors.mesh import Rank
from rl.actors.policy_trainer import PolicyTrainer, TrainerMesh
from rl.errors import ActorFailure, NodeLost, RunError
from rl.observe.events import Events
from rl.observe.spans import Stopwatch
from rl.session.concurrency import Signal, background
from rl.session.device_sharing import DeviceSharing
from rl.session.push_checks import LoadedVersion, PushChecks
from rl.session.recovery import unless_lost
from rl.session.session_config import SessionConfig
from rl.training.trainer_config import Source
from rl.weights.transport import Transfer, TransferFailed, VersionGone, choose_transport

UNLIMITED = 1000
NONE = -1  # version before the first
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
        await push.connect(generators)          # they have the trainer's weights
        async with background(push.run()):
            version = push.publish()            # copy the new weights, behind what comes next
            await push.pull(version)            # have every generator load them
            await push.settle()                 # before the weights change again

    The transport keeps the last two published versions readable.

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
    - Instead of the policy, generators can ``hold`` a snapshot or the base model. Versions that are
      pushed are then higher than those of the policy, since each has a number of its own.
    """

    config: SessionConfig
    trainer: TrainerMesh
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
        self.checks = PushChecks(config, self.trainer, self.devices)
        self._in_order = config.pushes == "in_order"
        self._compares = self.checks.are_on and (config.compares_all or not self._in_order)
        is_rolling = generator is not None and generator.update == "rolling"
        self._rolling = is_rolling and not self._in_order
        self._is_changing = False  # the weights, which must not be compared then
        self._in_turns = self.devices.share("trainer", "generator")
        self._settling = 0  # number of tasks that wait until the weights may change
        self._unchecked: deque[LoadedVersion] = deque()
        self._generators: list[GeneratorMesh] = []
        self._joining = asyncio.Lock()  # no pull while a generator joins or leaves
        self._changed = Signal()
        self._policy = self._present_policy  # that was published last
        self._addresses: list[Any] = []

    @property
    def max_generators(self) -> int:
        """Maximum number of generators until the transport is opened again."""
        return self._transfer.generators if self._transfer.is_network else UNLIMITED

    async def connect(self, generators: Sequence[GeneratorMesh]) -> str:
        """Open the push to ``generators`` and bring them the trainer's weights; return the plan.

        Raises ValueError, which names the parameter, if the trainer's layout does not cover the
        generators'.
        """
        self._generators = [*generators]
        self._unchecked.clear()
        self.checks.forget()
        plan = await self._open()
        self.state = PushState()
        self._changed.notify()
        async with background(self._publish_each()):
            await self.pull(self.publish())
        return plan

    async def join(self, generator: GeneratorMesh) -> None:
        """Bring a generator that is new or was started again the weights of the others."""
        async with self._joining:
            if generator not in self._generators:
                self._generators.append(generator)
            await self._connect(generator)
            state = self.state
            await self._pull(generator, state.loaded if self._in_order else state.readable)

    async def remove(self, generator: GeneratorMesh) -> None:
        """Leave a generator out until it joins again. A publish under way stops waiting for it."""
        if generator in self._generators:
            self._generators.remove(generator)
            await self.trainer.call(PolicyTrainer.excuse, generator.number)

    async def run(self) -> None:
        """Publish versions that were started, and compare versions that have arrived."""
        async with background(self._compare_each()):
            await self._publish_each()

    def publish(self, source: Source = None) -> int:
        """Have ``run`` make the policy's weights readable, or those of ``source``, if they changed
        since the last time; return their version without waiting.
        """
        state = self.state
        policy = self._present_policy if source is None else (NONE, 0)
        if state.pending[1:] != (source, policy):
            state.pending = Pushed(max(state.pending.version + 1, policy[0]), source, policy)
        if source is None:
            self._policy = policy
            self._is_changing = False
        self._changed.notify()
        return state.pending.version

    @property
    def _present_policy(self) -> tuple[int, int]:
        """Version and number of loads of the trainer, which tell its weights from earlier ones."""
        return self.trainer.version, self.trainer.loads

    def has(self, source: Source) -> bool:
        """Whether the trainer still has the weights of ``source`` that were published last."""
        return source is not None or self._policy == self._present_policy

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
        if source is None and (self._is_changing or not self.has(source)):
            raise RunError(
                "the generators hold a snapshot, and the policy has changed since its last push: "
                "call push() before sampling from it"
            )
        if source is not None:
            await self._until_unread()
            async with self.devices.of("trainer", "model"):
                # It fails here rather than in ``run``.
                await self.trainer.call(PolicyTrainer.merge, source)
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
            behind = [each for each in self._generators if each.version != wanted.version]
            with self.watch.span("push"):
                if self._rolling:
                    pauses = [
                        await unless_lost(each, self._pull(each, wanted))
                        for each in behind
                        if each in self._generators  # it may have left during the pulls of others
                    ]
                else:
                    pauses = await asyncio.gather(
                        *(unless_lost(each, self._pull(each, wanted)) for each in behind)
                    )
            self.metrics["timing/push_pause"] = max(filter(None, pauses), default=0.0)
            state.loaded = wanted
            self._changed.notify()
            return wanted.version

    async def settle(self) -> None:
        """Wait until nothing reads the trainer's weights, not even a check."""
        with self.watch.span("push_wait"):
            await self._until_unread()
            self._is_changing = True

    async def _until_unread(self) -> None:
        self._settling += 1
        self._changed.notify()
        try:
            await self._changed.until(self._may_change)
        finally:
            self._settling -= 1

    def _may_change(self) -> bool:
        state = self.state
        late = self._compares and state.loaded != state.pending
        return state.pending == state.readable and not late and not self._unchecked

    async def _open(self) -> str:
        """Plan the routes and open both ends of each."""
        generators = self._generators
        weights = self.config.weights
        deadlines = self.config.deadlines
        async with self.devices.of("trainer", "model"):
            sources = await self.trainer.call(Rank.layout)
        async with self.devices.of("generator"):
            layouts = await asyncio.gather(*(each.call(Rank.layout) for each in generators))
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
        # A reader of shared memory that hangs ends by the deadline of its call; the trainer waits
        # longer.
        timeout_s = deadlines.push if transfer.is_network else deadlines.call
        timeout_s += transfer.nbytes / (weights.min_gb_s * 1e9)
        self._transfer = replace(transfer, timeout_s=timeout_s)
        async with self.devices.of("trainer", "model"):
            self._addresses = await self.trainer.open_publishers(self._transfer)
        await asyncio.gather(*map(self._connect, generators))
        return transfer.describe()

    async def _connect(self, generator: GeneratorMesh) -> None:
        async with self.devices.of("generator"):
            await generator.connect(self._transfer, self._addresses)

    async def _publish_each(self) -> None:
        """Publish each version that was begun. With ``pushes`` in order, the version before must
        have arrived.
        """

        def may_publish() -> bool:
            state = self.state
            waits = self._in_order and state.loaded != state.readable
            return state.pending != state.readable and not waits

        while True:
            await self._changed.until(may_publish)
            state = self.state
            version, source, _ = pending = state.pending
            async with self.devices.of("trainer", "model"):
                with self.watch.span("push"), self.watch.span("publish", "trainer"):
                    ranks = self.trainer.on(extra_s=self._transfer.timeout_s)
                    sent = await ranks.call(PolicyTrainer.push_weights, version, source)
                if self._in_turns:
                    with self.watch.span("check"):
                        await self.checks.digest(version, self._transfer.dtype, source)
            self.metrics = {
                "push/bytes": sum(each.bytes_full for each in sent),
                "push/bytes_sent": sum(each.bytes_sent for each in sent),
            }
            self.events.emit("pushed", version=version, metrics=self.metrics)
            state.readable = pending
            self._changed.notify()

    async def _pull(self, generator: GeneratorMesh, wanted: Pushed) -> float:
        """Have a generator load weights, or newer ones; return the pause of generation, in s.

        Transfers that fail are repeated at growing intervals.
        """
        failures = 0
        async with self.devices.of("generator"):
            with self.watch.span("pull", generator.name):
                while True:
                    try:
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
        return pause

    async def _next(self, failure: ActorFailure, wanted: Pushed, failures: int) -> Pushed:
        """Return the weights to pull after a pull of ``wanted`` failed; raise if none are left.

        Raises NodeLost if transfers between living processes keep failing.
        """
        # Reads from a trainer that died may fail before its death is known.
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
            is_newest = arrival.version == self.state.pending.version
            changes = self._is_changing and arrival.source is None
            if is_newest and self.has(arrival.source) and not changes:
                await self._compare(arrival)
            self._unchecked.popleft()
            self._changed.notify()

    async def _compare(self, arrival: LoadedVersion) -> None:
        """Compare an arrival.

        - A trainer that shares its devices with generators computes its side of the canary in the
          turn in which it waits for that.
        - Another trainer gets both calls at once, so that it does not idle between them.
        """
        checks = self.checks
        if not self._in_turns:
            with self.watch.span("check"):
                async with background() as both:
                    both.create_task(checks.compare_digests(arrival))
                    both.create_task(checks.compare_canary(arrival, self.metrics))
            return
        with self.watch.span("check"):
            await checks.compare_digests(arrival)
        if arrival.answer is not None:
            await self._changed.until(lambda: self._settling)
        with self.watch.span("check"):
            await checks.compare_canary(arrival, self.metrics)
