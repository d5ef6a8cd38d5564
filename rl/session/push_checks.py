"""PushChecks: proof that a generator has the trainer's weights, by digests and a canary."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rl.actors.generator import GeneratorMesh
from rl.actors.policy_trainer import TrainerMesh
from rl.errors import RankLost, RunError
from rl.generation.generator_config import CPU_BLOCK
from rl.model.digest import ShardDigests, differing, merge_digests
from rl.model.shape import shape_of
from rl.observe.spans import Stopwatch
from rl.session.concurrency import background
from rl.session.device_sharing import DeviceSharing
from rl.session.session_config import SessionConfig
from rl.training.start_weights import StartWeights
from rl.training.trainer_config import Source
from rl.types import Batch, Completion, GenerationRequest, Sampling

TOKENS = 4


class LoadedVersion(NamedTuple):
    """A version that a generator has loaded, and what it says about that version."""

    generator: GeneratorMesh
    version: int
    source: Source
    answer: Completion | None
    """Answer to the canary; None without one."""
    digests: list[ShardDigests] | None
    """Digests of its parameters; None if they can still be asked for, or without digests."""


@dataclass(eq=False)
class PushChecks:
    """Compares a generator with the trainer, which must have the same version.

    - ``weights.digests``: compare a digest of each parameter.
    - ``weights.canary_tolerance``: compare log-probs of a few tokens after a fixed prompt, the
      canary. They also differ if the weights are right but the generator has cached keys of older
      weights, or another kernel.

    The trainer computes its side once for a version, and again only for generators with another
    dtype, or with other tokens or experts after the canary. If trainer and generators share
    devices, each side computes digests in the turn in which it has them. Without a trainer, digests
    are compared with those of the files, and the canary with that of the first generator.
    """

    config: SessionConfig
    weights: TrainerMesh | StartWeights
    devices: DeviceSharing
    watch: Stopwatch
    settling: Callable[[], Awaitable[None]]
    """Function that returns when the trainer waits until its weights may change."""

    def __post_init__(self) -> None:
        config = self.config
        from_files = isinstance(self.weights, StartWeights)
        self.expected = "the files'" if from_files else "the trainer's"
        """The side that generators are compared with, for messages."""
        self._digests = config.weights.digests
        self._first: Completion | None = None
        self._in_turns = self.devices.share("trainer", "generator")
        generator = config.generator
        dtype = generator.dtype if generator else "float32"
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._tolerance = config.weights.canary_limit(dtype) if generator else 0.0
        block_size = (generator.block_size if generator else None) or CPU_BLOCK  # CUDA's is 16
        longest = config.longest_sequence
        suspects = ["a cache of older weights"]
        if config.trainer is not None and config.trainer.lora is not None:
            suspects.append("an adapter that was not merged")
        if shape_of(config.model).num_experts:
            suspects.append("a choice of other experts")
        self._suspects = f"{', '.join(suspects)} or another kernel"
        # A prompt of more than one block finds a stale block.
        length = max(1, min(block_size + 64, longest - TOKENS))
        draw = torch.Generator().manual_seed(0)
        vocab_size = shape_of(config.model).vocab_size
        self._canary = GenerationRequest(
            request_id="canary",
            prompt_tokens=torch.randint(vocab_size, (length,), generator=draw).tolist(),
            seed=0,
            sampling=Sampling(max_tokens=min(TOKENS, longest - 1)),
        )
        self.forget()

    def forget(self) -> None:
        """Forget the trainer's side: its weights may have changed without a new version."""
        self._scored: tuple[tuple[Any, ...], torch.Tensor] | None = None
        self._digested: tuple[int, torch.dtype] | None = None
        self._trained: dict[str, str] = {}

    @property
    def are_on(self) -> bool:
        """Whether to compare anything."""
        return self._digests or self._tolerance > 0

    async def ask(self, generator: GeneratorMesh, version: int, source: Source) -> LoadedVersion:
        """Ask a generator for the canary with ``version``, the weights of ``source``, which it has
        loaded.
        """
        answer = digests = None
        if self._tolerance > 0:
            request = replace(self._canary, request_id=f"canary/{version}", seed=version)
            (answer,) = await generator.generate([request])
        if self._digests and self._in_turns:
            digests = await generator.weight_digests()
        return LoadedVersion(generator, version, source, answer, digests)

    async def digest(self, version: int, source: Source) -> None:
        """Compute the trainer's digests of ``version``, if any are compared. The trainer must have
        its device.
        """
        if self._digests:
            owner = f"push of policy version {version}: "
            await self._digest(version, self._dtype, source, owner)

    async def compare(self, loaded: LoadedVersion, metrics: dict[str, float]) -> None:
        """Compare digests and canary. Raises RunError for what differs.

        - A trainer that shares its devices with generators computes its side of the canary in the
          turn in which it waits for that.
        - Another trainer gets both calls at once, so that it does not idle between them.
        - Files are read for one comparison at a time.

        ``push/canary`` of ``metrics`` becomes the largest difference of a log-prob so far.
        """
        if not self._in_turns and not isinstance(self.weights, StartWeights):
            with self.watch.span("check"):
                async with background() as both:
                    both.create_task(self._compare_digests(loaded))
                    both.create_task(self._compare_canary(loaded, metrics))
            return
        with self.watch.span("check"):
            await self._compare_digests(loaded)
        if loaded.answer is not None:
            await self.settling()
        with self.watch.span("check"):
            await self._compare_canary(loaded, metrics)

    async def _compare_digests(self, loaded: LoadedVersion, *, always: bool = False) -> None:
        """Raise RunError that names the first parameter that differs, if digests are compared or
        ``always``, unless the generator was lost meanwhile.
        """
        owner = f"push of policy version {loaded.version}: "
        if (always or self._digests) and (wrong := await self.differing(loaded, owner)):
            raise RunError(
                f"{owner}{len(wrong)} of {len(self._trained)} parameters of "
                f"{loaded.generator.name} "
                f"differ from {self.expected}; the first is {wrong[0]}"
            )

    async def _compare_canary(self, loaded: LoadedVersion, metrics: dict[str, float]) -> None:
        """Raise RunError if a log-prob differs by more than the tolerance."""
        generator, version, source, answer, _ = loaded
        if answer is None:
            return
        key = (version, answer.tokens, answer.experts)
        if self._scored is None or self._scored[0] != key:
            self._scored = (key, await self._source_logprobs(answer, source))
        difference = float((self._scored[1] - torch.tensor(answer.logprobs)).abs().max())
        metrics["push/canary"] = max(difference, metrics.get("push/canary", 0.0))
        if not difference <= self._tolerance:
            await self._compare_digests(loaded, always=True)
            raise RunError(
                f"canary of policy version {version}: a log-prob of {generator.name} differs by "
                f"{difference:.3g} from {self.expected}, above weights.canary_tolerance="
                f"{self._tolerance}; all parameters are equal, so {self._suspects} makes the "
                "difference"
            )

    async def differing(self, loaded: LoadedVersion, owner: str = "") -> list[str]:
        """Return the names of the generator's parameters that differ, in a bit of its own dtype,
        from those of its source; none if it was started again and lost the version.

        Raises RunError that begins with ``owner`` if ranks differ in a part that both have.
        """
        generator, version, source, _, digests = loaded
        if digests is None:
            async with self.devices.of("generator", "model"):
                if generator.version != version:  # it was started again
                    return []
                with suppress(RankLost):  # it is started again
                    digests = await generator.weight_digests()
        if digests is None:
            return []
        if self._digested != (version, generator.dtype):
            async with self.devices.of("trainer", "model"):
                await self._digest(version, generator.dtype, source, owner)
        return differing(self._trained, _merged(digests, f"{owner}{generator.name}"))

    async def _digest(self, version: int, dtype: torch.dtype, source: Source, owner: str) -> None:
        if isinstance(self.weights, StartWeights):
            digests = [await asyncio.to_thread(self.weights.digests, dtype)]
        else:
            digests = await self.weights.weight_digests(dtype, source)
        self._trained = _merged(digests, f"{owner}trainer")
        self._digested = (version, dtype)

    async def _source_logprobs(self, answer: Completion, source: Source) -> torch.Tensor:
        """Return the trainer's log-probs of ``answer`` after the canary's prompt. Without a
        trainer, return those of the first answer as far as the tokens are the same.
        """
        if isinstance(self.weights, StartWeights):
            first = self._first = self._first or answer
            pairs = zip(first.tokens, answer.tokens, strict=False)
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(answer.tokens))
            return torch.tensor([*first.logprobs[:same], *answer.logprobs[same:]])
        prompt = self._canary.prompt_tokens
        tokens = torch.tensor(prompt + answer.tokens)
        lengths, weights = torch.tensor([len(tokens)]), torch.ones(len(tokens))
        batch = Batch(tokens=tokens, lengths=lengths, loss_weights=weights, experts=answer.experts)
        temperature = self._canary.sampling.temperature
        async with self.devices.of("trainer", "model"):
            scored = await self.weights.forward(batch, temperature=temperature, source=source)
        return scored["logprobs"][len(prompt) :]


def _merged(digests: list[ShardDigests], owner: str) -> dict[str, str]:
    try:
        return merge_digests(digests)
    except ValueError as error:  # it names only the parameter
        raise RunError(f"{owner}: {error}") from None
