"""The push, as the controller sees it: begun, arrived, settled."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from rl.actors.generator import GeneratorMesh
from rl.config import RLConfig
from rl.controller.canary import Canary
from rl.controller.concurrency import Signal, background
from rl.controller.dispatch import Dispatch
from rl.errors import ActorFailure, NodeLost, RunError
from rl.observe.spans import Stopwatch
from rl.types import Completion
from rl.weights.digest import ShardDigests, merge_digests
from rl.weights.open import choose_transport
from rl.weights.transport import Transfer, TransferFailed, VersionGone

NETWORK = ("rdma", "torchstore")  # whose publishers have a place for each reader
MOST = 1000


class WeightPush:
    """Brings the weights after each step to the generators, and makes sure that they are the ones.
    ::

        push = WeightPush(config, dispatch, watch, changed, print)
        await push.connect(generators, step)    # they hold the trainer's weights after ``step``
        async with background(push.run()):
            push.begin(step)        # publish the new weights, behind what the trainer does next
            await push.arrive(step) # every generator holds them
            await push.settle()     # before the weights change again: nothing reads them any more

    In a deterministic pipeline generators pull when ``arrive`` asks for it, step after step, and a
    publish waits until the one before has arrived: of the two versions that can be read, one is
    what the generators hold, and one that comes back can have it again. In an asynchronous pipeline
    they pull whatever is newest as soon as it is there; one that was so slow that its version is
    gone pulls the newest then. A transfer that failed while both ends are alive is repeated
    ``max_restarts`` times.

    What is checked, as configured: a digest of each parameter, and a canary's log-probs. The
    generators answer the canary before anything else; the trainer's side runs behind what they
    generate next, and in turn with the engine. Weights that arrive when the trainer has left them,
    as a deterministic pipeline with a ``max_staleness`` above 1 has it, cannot be compared and are
    not.
    """

    def __init__(
        self,
        config: RLConfig,
        dispatch: Dispatch,
        watch: Stopwatch,
        changed: Signal,
        warn: Callable[[str], None],
    ):
        self._deadlines = config.deadlines
        self._max_failures = config.max_restarts
        self._warn = warn
        self._config = config.weights
        self._canary = Canary(config)
        self._dispatch = dispatch
        self._trainer = dispatch.policy
        self._watch = watch
        self._on_demand = config.rollout.pipeline == "deterministic"
        self._rolling = config.generator.update == "rolling" and not self._on_demand
        checks = config.weights.digests or self._canary.tolerance > 0
        self._waits_for_checks = checks and (
            config.rollout.max_staleness <= 1 or not self._on_demand
        )
        self._numbers: dict[GeneratorMesh, int] = {}
        self._gone: list[int] = []
        self._joining = asyncio.Lock()  # no pull while a generator joins or leaves
        self._changed = changed
        self._addresses: list[Any] = []
        self._versions: dict[int, int] = {}
        self._begun = self._published = self._arrived = 0
        self._stepping = False
        self._unchecked: list[tuple[GeneratorMesh, int, Completion | None]] = []
        self.metrics: dict[str, float] = {}
        """Of the last push."""

    @property
    def held(self) -> int:
        """Policy version that every generator has, or a newer one."""
        return self._versions[self._arrived]

    @property
    def arrived(self) -> int:
        """Step whose weights every generator has, or newer ones."""
        return self._arrived

    async def connect(self, generators: Sequence[GeneratorMesh], step: int) -> str:
        """Open the push to ``generators`` and bring them what the trainer has; the plan, for
        people.

        Raises ValueError, naming the parameter, where the trainer's layout does not fill the
        generators'.
        """
        self._numbers = {generator: number for number, generator in enumerate(generators)}
        self._gone = []
        self._begun = self._published = self._arrived = step
        self._versions = {step: self._trainer.version}
        self._unchecked = []
        self._stepping = False
        plan = await self._open()
        await self._publish()
        await self._bring(step)
        return plan

    @property
    def most(self) -> int:
        """How many generators the transport has room for until it is opened again."""
        return self._transfer.generators if self._transfer.transport in NETWORK else MOST

    async def join(self, generator: GeneratorMesh) -> None:
        """Bring one generator, new or started again, what the others have."""
        async with self._joining:
            taken = self._numbers.values()
            self._numbers.setdefault(generator, min(set(range(len(taken) + 1)) - set(taken)))
            await self._connect(generator)
            await self._pull(
                generator, self._versions[self._arrived if self._on_demand else self._published]
            )

    def remove(self, generator: GeneratorMesh) -> None:
        """Leave a generator out until it joins again."""
        if generator in self._numbers:
            self._gone.append(self._numbers.pop(generator))
            self._changed.notify()

    async def run(self) -> None:
        """Publish what is begun, check what has arrived, and in an asynchronous pipeline pull what
        is published.
        """
        async with background(self._publish_each(), self._check_each(), self._excuse_each()):
            while True:
                await self._changed.until(
                    lambda: self._published > self._arrived and not self._on_demand
                )
                await self._bring(self._published)

    def begin(self, step: int) -> None:
        """Publish the trainer's weights, unless the step was skipped and changed none.

        Does not wait.
        """
        self._begun = step
        self._stepping = False
        self._versions[step] = self._trainer.version
        self._changed.notify()

    async def arrive(self, step: int) -> None:
        """Wait until all generators hold the weights after ``step``; where they pull on demand,
        this is the demand.
        """
        await self._changed.until(lambda: self._published >= step)
        if self._on_demand and self._arrived < step:
            await self._bring(step)
        await self._changed.until(lambda: self._arrived >= step)

    async def settle(self) -> None:
        """Wait until nothing reads the trainer's weights, not even a check."""
        with self._watch.span("push_wait"):
            await self._changed.until(
                lambda: (
                    self._published == self._begun
                    and not (self._waits_for_checks and self._arrived < self._begun)
                    and not self._unchecked
                )
            )
            self._stepping = True

    async def _open(self) -> str:
        """Plan the routes and open both ends of each."""
        generators = list(self._numbers)
        async with self._dispatch.resident("policy", "model"):
            sources = await self._trainer.layouts()
        async with self._dispatch.resident("generator", "model"):
            layouts = await asyncio.gather(*(generator.layouts() for generator in generators))
        domains = [domain for domain, _ in chain(sources, *layouts)]
        self._transfer = Transfer(
            transport=choose_transport(self._config.transport, domains),
            dtype=generators[0].dtype,
            sources=tuple(layout for _, layout in sources),
            wanted=tuple(layout for _, layout in layouts[0]),
            generators=len(generators),
            delta=self._config.delta,
        )
        # A reader of shared memory that hangs is ended by the deadline of its call: the trainer has
        # to outlast that.
        patience = (
            self._deadlines.push if self._transfer.transport in NETWORK else self._deadlines.call
        )
        patience += self._transfer.nbytes / (self._config.min_gb_s * 1e9)
        self._transfer = replace(self._transfer, patience=patience)
        plan = self._transfer.describe()
        async with self._dispatch.resident("policy", "model"):
            self._addresses = await self._trainer.open_publishers(self._transfer)
        await asyncio.gather(*(self._connect(generator) for generator in generators))
        return plan

    async def _connect(self, generator: GeneratorMesh) -> None:
        async with self._dispatch.resident("generator", "model"):
            await generator.connect(
                self._transfer, self._addresses, generator=self._numbers[generator]
            )

    async def _publish_each(self) -> None:
        while True:
            await self._changed.until(lambda: self._begun > self._published)
            await self._changed.until(
                lambda: self._arrived == self._published or not self._on_demand
            )
            if self._versions[self._begun] != self._versions[self._published]:
                await self._publish()
            self._published = self._begun
            self._changed.notify()

    async def _excuse_each(self) -> None:
        while True:
            await self._changed.until(lambda: self._gone)
            await self._trainer.excuse(self._gone.pop())

    async def _publish(self) -> None:
        async with self._dispatch.resident("policy", "model"):
            with self._watch.span("push"):
                _, sent = await self._trainer.push_weights()
        self.metrics = {"push/bytes": sent.bytes_full, "push/bytes_sent": sent.bytes_sent}

    async def _bring(self, step: int) -> None:
        """Have every generator pull the weights after ``step``."""
        version = self._versions[step]
        async with self._joining:
            behind = [generator for generator in self._numbers if generator.version != version]
            with self._watch.span("push"):
                if self._rolling:
                    pauses = [await self._pull_or_lose(generator, version) for generator in behind]
                else:
                    pauses = await asyncio.gather(
                        *(self._pull_or_lose(generator, version) for generator in behind)
                    )
        self.metrics["timing/push_pause"] = max(pauses, default=0.0)
        self._arrived = step
        self._versions = {each: version for each, version in self._versions.items() if each >= step}
        self._changed.notify()

    async def _pull_or_lose(self, generator: GeneratorMesh, version: int) -> float:
        """``_pull``; one that is lost on the way has whoever keeps it see to that."""
        if generator not in self._numbers:  # it was left out while others had their turn
            return 0.0
        try:
            return await self._pull(generator, version)
        except ActorFailure as failure:
            if failure.actor != generator.name or not failure.is_lost:
                raise
            return 0.0

    async def _pull(self, generator: GeneratorMesh, version: int) -> float:
        """Bring ``version``, or a newer one; the seconds that generation stood still for it."""
        async with self._dispatch.resident("generator", "model"):
            pause = await self._pull_or_try_again(generator, version)
            version = generator.version or version
            if self._canary.tolerance > 0:
                with self._watch.span("check"):
                    self._unchecked.append(
                        (generator, version, await self._canary.ask(generator, version))
                    )
            elif self._config.digests:
                self._unchecked.append((generator, version, None))
        self._changed.notify()
        return pause

    async def _pull_or_try_again(self, generator: GeneratorMesh, version: int) -> float:
        """The seconds that generation stood still.

        Raises NodeLost if transfers fail between ends that are alive.
        """
        failures = 0
        while True:
            try:
                return await generator.pull_weights(version)
            except ActorFailure as failure:
                if failure.is_lost:
                    raise
                await (
                    self._trainer.check_alive()
                )  # reads from a trainer that died may fail before its death is known
                newest = version if self._on_demand else self._versions[self._published]
                if isinstance(failure.__cause__, TransferFailed):
                    failures += 1
                    if failures > self._max_failures:
                        raise NodeLost(
                            f"{failure}\nthe transfer failed {failures} times in a row while "
                            "the trainer is alive: the "
                            "network between the nodes is broken, or slower than weights.min_gb_s"
                        ) from failure
                elif newest == version or not isinstance(failure.__cause__, VersionGone):
                    raise
                self._warn(f"{str(failure).splitlines()[0]}; pulling version {newest}")
                version = newest

    async def _check_each(self) -> None:
        while True:
            await self._changed.until(lambda: self._unchecked)
            generator, version, answer = self._unchecked[0]
            if version == self._trainer.version and not self._stepping:
                with self._watch.span("check"):
                    await self._check(generator, version, answer)
            self._unchecked.pop(0)
            self._changed.notify()

    async def _check(
        self, generator: GeneratorMesh, version: int, answer: Completion | None
    ) -> None:
        try:
            if self._config.digests:
                await self._compare_digests(generator, version)
            if answer is None:
                return
            difference = await self._canary.difference(self._dispatch, answer)
            self.metrics["push/canary"] = max(difference, self.metrics.get("push/canary", 0.0))
            if not difference <= self._canary.tolerance:
                await self._compare_digests(generator, version)
                raise RunError(
                    f"canary of policy version {version}: a log-prob of {generator.name} differs "
                    f"by {difference:.3g} from the trainer's, above "
                    f"weights.canary_tolerance={self._canary.tolerance}; all parameters are equal, "
                    "so a cache of older weights or another kernel makes the difference"
                )
        except ActorFailure as failure:
            if failure.actor != generator.name or not failure.is_lost:
                raise

    async def _compare_digests(self, generator: GeneratorMesh, version: int) -> None:
        async with self._dispatch.resident("policy", "model"):
            sources = await self._trainer.weight_digests(generator.dtype)
        async with self._dispatch.resident("generator", "model"):
            if generator.version != version:  # it was started again
                return
            wanted = await generator.weight_digests()
        trained = _merged(sources, f"push of policy version {version}: trainer")
        pushed = _merged(wanted, f"push of policy version {version}: {generator.name}")
        if wrong := [name for name in trained if pushed.get(name) != trained[name]]:
            raise RunError(
                f"push of policy version {version}: {len(wrong)} of {len(trained)} parameters of "
                f"{generator.name} differ from the trainer's; the first is {wrong[0]}"
            )


def _merged(digests: list[ShardDigests], owner: str) -> dict[str, str]:
    try:
        return merge_digests(digests)
    except ValueError as error:  # names the parameter, but neither side nor version
        raise RunError(f"{owner}: {error}") from None
