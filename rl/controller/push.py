"""The push, as the controller sees it: begun, arrived, settled."""

import asyncio
from collections.abc import Sequence

from rl.actors.generator import GeneratorMesh
from rl.actors.trainer import TrainerMesh
from rl.config import RunConfig
from rl.controller.canary import Canary
from rl.errors import RunError
from rl.observe.spans import Stopwatch
from rl.types import Completion
from rl.weights.digest import PartDigests, merge_digests
from rl.weights.open import choose_transport
from rl.weights.transport import Sent, Transfer


class WeightPush:
    """Brings each version of the trainer's weights to the generators, and makes sure that it is the one. ::

        push = WeightPush(config, trainer, generators, watch)
        await push.connect()
        push.begin()              # the weights are new: publish them, behind whatever the trainer does next
        await push.arrive()       # before generating with them: all generators hold them
        await push.settle()       # before the weights change again: nothing reads them any more, all checks passed

    What is checked, as configured: a digest of each parameter, and a canary's log-probs. The generators answer the
    canary before anything else; the trainer's side runs behind what they generate next, and in turn with the engine.
    """

    def __init__(self, config: RunConfig, trainer: TrainerMesh, generators: Sequence[GeneratorMesh], watch: Stopwatch):
        self._config, self._canary = config.weights, Canary(config)
        self._trainer, self._generators, self._watch = trainer, generators, watch
        self._begun: int | None = None
        self._publishing: asyncio.Task[Sent] | None = None
        self._arriving: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self.metrics: dict[str, float] = {}
        """Of the last push that arrived."""

    async def connect(self) -> str:
        """Plan the routes and open both ends of each; the plan, for people. A trainer may be another than before.

        Raises ValueError, naming the parameter, where the trainer's layout does not fill the generators'.
        """
        self._begun = self._publishing = self._arriving = self._checking = None
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
            self._arriving = self._checking = None

    async def arrive(self) -> None:
        """Wait until all generators hold what was begun last."""
        if self._arriving is None:
            self._arriving = asyncio.create_task(self._bring())
        await self._arriving

    async def settle(self) -> None:
        """Wait until nothing reads the trainer's weights, not even a check. Raises RunError where one fails."""
        with self._watch.span("push_wait"):
            if self._publishing is not None:
                await self._publishing
            if self._arriving is not None and self._checks:
                await self._arriving
            if self._checking is not None:
                await self._checking

    @property
    def _checks(self) -> bool:
        return self._config.digests or self._canary.tolerance > 0

    async def _publish(self) -> Sent:
        with self._watch.span("push"):
            return (await self._trainer.push_weights())[1]

    async def _bring(self) -> None:
        assert self._publishing is not None and self._begun is not None, "begin comes first"
        version, sent = self._begun, await self._publishing
        with self._watch.span("push"):
            pauses = await asyncio.gather(*(generator.pull_weights(version) for generator in self._generators))
        self.metrics = {
            "push/bytes": sent.bytes_full,
            "push/bytes_sent": sent.bytes_sent,
            "timing/push_pause": max(pauses),
        }
        if not self._checks:
            return
        answers: list[Completion] = []
        if self._canary.tolerance > 0:
            with self._watch.span("check"):
                answers = await asyncio.gather(*(self._canary.ask(each, version) for each in self._generators))
        self._checking = asyncio.create_task(self._check(version, answers))

    async def _check(self, version: int, answers: list[Completion]) -> None:
        with self._watch.span("check"):
            if self._config.digests:
                await self._compare_digests(version)
            for number, answer in enumerate(answers):
                difference = await self._canary.difference(self._trainer, answer)
                self.metrics["push/canary"] = max(difference, self.metrics.get("push/canary", 0.0))
                if not difference <= self._canary.tolerance:
                    await self._compare_digests(version)
                    raise RunError(
                        f"canary of policy version {version}: a log-prob of generator {number} differs by "
                        f"{difference:.3g} from the trainer's, above weights.canary_tolerance={self._canary.tolerance};"
                        " all parameters are equal, so a cache of older weights or another kernel makes the difference"
                    )

    async def _compare_digests(self, version: int) -> None:
        for number, generator in enumerate(self._generators):
            sources, wanted = await asyncio.gather(
                self._trainer.weight_digests(generator.dtype), generator.weight_digests()
            )
            trained = _merged(sources, f"push of policy version {version}: trainer")
            pushed = _merged(wanted, f"push of policy version {version}: generator {number}")
            if wrong := [name for name in trained if pushed.get(name) != trained[name]]:
                raise RunError(
                    f"push of policy version {version}: {len(wrong)} of {len(trained)} parameters of generator "
                    f"{number} differ from the trainer's; the first is {wrong[0]}"
                )


def _merged(ranks: list[PartDigests], owner: str) -> dict[str, str]:
    try:
        return merge_digests(ranks)
    except ValueError as error:  # names the parameter, but neither side nor version
        raise RunError(f"{owner}: {error}") from None
