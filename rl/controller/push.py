"""The push, as the controller sees it: begun, arrived, settled."""

import asyncio
from collections.abc import Sequence

from rl.actors.generator import GeneratorMesh
from rl.actors.trainer import TrainerMesh
from rl.config import RunConfig
from rl.controller.canary import Canary
from rl.errors import RunError
from rl.observe.spans import Stopwatch
from rl.weights.digest import merge_digests
from rl.weights.open import Transfer, choose_transport


class WeightPush:
    """Brings each version of the trainer's weights to the generators, and makes sure that it is the one. ::

        push = WeightPush(config, trainer, generators, watch)
        await push.connect()
        push.begin()              # the weights are new: publish them, behind whatever the trainer does next
        await push.arrive()       # before generating with them: all generators hold them, checked
        await push.settle()       # before the weights change again: nothing reads them any more

    What is checked, as configured: a digest of each parameter, and a canary's log-probs.
    """

    def __init__(self, config: RunConfig, trainer: TrainerMesh, generators: Sequence[GeneratorMesh], watch: Stopwatch):
        self._config, self._canary = config.weights, Canary(config)
        self._trainer, self._generators, self._watch = trainer, generators, watch
        self._begun: int | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._arriving: asyncio.Task[None] | None = None
        self.metrics: dict[str, float] = {}
        """Of the last push."""

    async def connect(self) -> str:
        """Plan the routes and open both ends of each; the plan, for people.

        Raises ValueError, naming the parameter, where the trainer's layout does not fill the generators'.
        """
        sources, wanted = await asyncio.gather(self._trainer.layouts(), self._generators[0].layouts())
        transfer = Transfer(
            transport=choose_transport(self._config.transport, [domain for domain, _ in [*sources, *wanted]]),
            dtype=self._generators[0].dtype,
            sources=tuple(layout for _, layout in sources),
            wanted=tuple(layout for _, layout in wanted),
            generators=len(self._generators),
            delta=self._config.delta,
        )
        plan = transfer.describe()
        addresses = await self._trainer.open_publishers(transfer)
        await asyncio.gather(
            *(
                generator.connect(transfer, addresses, generator=number)
                for number, generator in enumerate(self._generators)
            )
        )
        return plan

    def begin(self) -> None:
        """Publish the trainer's weights, unless that was done (a skipped step changes none). Does not wait."""
        if self._begun != self._trainer.version:
            self._begun = self._trainer.version
            self._publishing = asyncio.create_task(self._publish())
            self._arriving = None

    async def arrive(self) -> None:
        """Wait until all generators hold what was begun last. Raises RunError where a check fails."""
        if self._arriving is None:
            self._arriving = asyncio.create_task(self._bring())
        await self._arriving

    async def settle(self) -> None:
        """Wait until nothing reads the trainer's weights, not even a check that is under way."""
        with self._watch.span("push_wait"):
            if self._publishing is not None:
                await self._publishing
            if self._arriving is not None and self._checks:
                await self._arriving

    @property
    def _checks(self) -> bool:
        return self._config.digests or self._canary.tolerance > 0

    async def _publish(self) -> None:
        with self._watch.span("push"):
            _, sent = await self._trainer.push_weights()
        self.metrics = {"push/bytes": sent.bytes_full, "push/bytes_sent": sent.bytes_sent}

    async def _bring(self) -> None:
        assert self._publishing is not None and self._begun is not None, "begin comes first"
        await self._publishing
        with self._watch.span("push"):
            pauses = await asyncio.gather(*(generator.pull_weights(self._begun) for generator in self._generators))
        self.metrics["timing/push_pause"] = max(pauses)
        with self._watch.span("check"):
            for number in range(len(self._generators)):
                await self._check(number)

    async def _check(self, number: int) -> None:
        if self._config.digests:
            await self._compare_digests(number)
        if self._canary.tolerance > 0:
            difference = await self._canary.difference(self._trainer, self._generators[number])
            self.metrics["push/canary"] = difference
            if not difference <= self._canary.tolerance:
                await self._compare_digests(number)
                raise RunError(
                    f"canary of policy version {self._begun}: a log-prob of generator {number} differs by "
                    f"{difference:.3g} from the trainer's, above weights.canary_tolerance={self._canary.tolerance}; "
                    "all parameters are equal, so a cache of older weights or another kernel makes the difference"
                )

    async def _compare_digests(self, number: int) -> None:
        generator = self._generators[number]
        trained, pushed = map(
            merge_digests,
            await asyncio.gather(self._trainer.weight_digests(generator.dtype), generator.weight_digests()),
        )
        if wrong := [name for name in trained if pushed.get(name) != trained[name]]:
            raise RunError(
                f"push of policy version {self._begun}: {len(wrong)} of {len(trained)} parameters of generator "
                f"{number} differ from the trainer's; the first is {wrong[0]}"
            )
