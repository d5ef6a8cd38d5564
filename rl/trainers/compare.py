"""Comparison of two sides of a run, module by module: trainer and generator, or two layouts."""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from collections.abc import Sequence as Several
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from rl.errors import counted
from rl.model.activations import Activations
from rl.model.shape import ModelShape, shape_of
from rl.observe.rollouts import Chunk
from rl.session.config import SessionConfig
from rl.session.session import Session
from rl.trainers.differences import (
    Finding,
    ModuleDifference,
    attention_cause,
    first_beyond_rounding,
    kind_of,
    module_differences,
    rotation_cause,
    temperature_of,
)
from rl.trainers.replay import Replayed
from rl.trainers.replay_rollouts import RolloutReplay
from rl.types import Batch, GivenSequence, Rollout, Sequence

WORST = 16
"""Number of tokens whose log-probs differ most at which modules are compared."""

SPREAD = 32
"""Number of further tokens, evenly spread, at which modules are compared."""

LOGPROB_TOLERANCES = {torch.float32: 1e-3}
"""Difference of a log-prob, in nats, that rounding may cause; 0.5 in all other types."""

Look = Callable[[Several[int], str], Awaitable[Activations]]
"""Returns the activations of a side at these positions, of modules whose names begin so."""


def comparing(config: SessionConfig) -> SessionConfig:
    """Return ``config`` with modules that can be looked at, at most one generator, and no checks of
    the push, which would end the comparison.
    """
    assert config.trainer is not None, "a run has a trainer"
    compiled = replace(config.trainer.compile, enable=False)
    generator = config.generator
    if generator is not None:
        generator = replace(generator, replicas=1, nodes=0, enforce_eager=True)
    return replace(
        config,
        trainer=replace(config.trainer, compile=compiled),
        generator=generator,
        weights=replace(config.weights, digests=False, canary_tolerance=0.0),
    )


def under(config: SessionConfig, degrees: Mapping[str, int]) -> SessionConfig:
    """Return the session of the policy alone, in the layout of these degrees."""
    assert config.trainer is not None, "a run has a trainer"
    parallelism = replace(config.trainer.parallelism, **degrees)
    return replace(config, trainer=replace(config.trainer, parallelism=parallelism), roles={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Recorded sequence that models are compared on."""

    rollout: Rollout
    number: int
    """Number of the rollout among those of its step."""
    sequence: Sequence
    trained: np.ndarray
    """Recorded log-probs of the trainer, float32 [T]; NaN if they were not recorded."""

    @property
    def gaps(self) -> np.ndarray:
        """Absolute difference of the recorded log-probs, float32 [T]; 0 for given tokens."""
        gaps = np.abs(self.trained - self.sequence.logprobs)
        return np.where(self.sequence.sampled & ~np.isnan(gaps), gaps, 0.0)

    def worst(self, count: int) -> list[int]:
        """Return the indices of the sampled tokens whose log-probs differ most, worst first."""
        sampled = np.flatnonzero(self.sequence.sampled)
        order = np.argsort(-self.gaps[sampled], kind="stable")
        return sampled[order][:count].tolist()

    @property
    def positions(self) -> list[int]:
        """Positions to compare: those before the worst tokens, the first three, and others."""
        last = len(self.sequence) - 2
        before = [index - 1 for index in self.worst(WORST)]
        spread = np.linspace(0, last, SPREAD).astype(int).tolist()
        return sorted({each for each in (*before, *spread, 0, 1, 2) if 0 <= each <= last})

    @property
    def batch(self) -> Batch:
        """The sequence as a batch."""
        tokens = torch.tensor(self.sequence.tokens).long()
        return Batch(
            tokens=tokens,
            lengths=torch.tensor([len(tokens)]),
            loss_weights=torch.tensor(self.sequence.sampled).float(),
            sampling_mask=self.sequence.sampling_mask,
        )


def examples_of(chunks: Several[Chunk]) -> list[Example]:
    """Return the longest sequence of each rollout of a step."""
    found = list[Example]()
    for chunk in chunks:
        start = 0
        logprobs = chunk.columns.get("trainer_logprobs")
        for rollout in chunk.rollouts:
            options = list[Example]()
            for sequence in rollout.sequences:
                trained = np.full(len(sequence), np.nan, dtype=np.float32)
                if logprobs is not None:
                    trained = logprobs[start : start + len(sequence)]
                start += len(sequence)
                options.append(
                    Example(rollout=rollout, number=0, sequence=sequence, trained=trained)
                )
            longest = max(options, key=lambda each: len(each.sequence))
            found.append(replace(longest, number=len(found)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Result of a comparison of two models on one sequence."""

    example: Example
    logprobs: dict[str, torch.Tensor]
    """Log-probs of the tokens by model, float32 [T]; NaN for given tokens."""
    modules: list[ModuleDifference]
    findings: list[Finding]
    """Differences beyond rounding, the first cause first."""

    def by_layer(self) -> dict[str, ModuleDifference]:
        """Return the largest difference of each layer, in the order of execution."""
        found: dict[str, ModuleDifference] = {}
        for each in self.modules:
            parts = each.name.split(".")
            layer = ".".join(parts[:2]) if parts[0] == "layers" else each.name
            found[layer] = max(found.get(layer, each), each, key=lambda one: one.error)
        return found


@asynccontextmanager
async def _loaded_before(
    replay: RolloutReplay, session: Session, step: int
) -> AsyncIterator[AsyncGenerator[Replayed]]:
    """Bring ``session`` to the weights before ``step``; yield the steps from ``step`` on."""
    await replay.load(session)
    async with aclosing(replay.steps(session)) as steps:
        for _ in range(replay.first, step - 1):
            await anext(steps)
        yield steps


async def with_generator(
    replay: RolloutReplay, session: Session, example: Example, step: int, temperature: float
) -> Compared:
    """Compare generator and trainer on the weights before ``step``, then the generator's cached
    prefixes after it.
    """
    async with _loaded_before(replay, session, step) as steps:
        await session.push()
        comparison = Comparison(session, example, temperature=temperature)
        compared = await comparison.compare()
        await comparison.cached(fresh=True)
        await anext(steps)  # other weights
        await session.push()
        cached = await comparison.cached(fresh=False)
        stale = stale_cache(cached, await comparison.cached(fresh=True))
    return replace(compared, findings=[*compared.findings, *stale])


async def in_own_layout(
    replay: RolloutReplay,
    session: Session,
    example: Example,
    step: int,
    temperature: float,
    copy: Path,
) -> Activations:
    """Return the activations of the trainer before ``step``; save its weights in ``copy``."""
    async with _loaded_before(replay, session, step):
        await session.save_weights(copy)
    return await session.activations(example.batch, example.positions, temperature=temperature)


async def in_layout(
    own: Activations,
    layout: str,
    session: Session,
    example: Example,
    temperature: float,
    copy: Path,
) -> Compared:
    """Compare the trainer of ``session``, in ``layout``, with its activations in its own layout,
    on the weights in ``copy``.
    """
    await session.load_weights(copy)
    other = await session.activations(example.batch, example.positions, temperature=temperature)
    modules = module_differences(own, other)
    sides = {"trainer": own, layout: other}
    findings = list[Finding]()
    if first := first_beyond_rounding(modules):
        shape = shape_of(session.config.model)
        findings.append(await cause_of(first, shape, sides, {}, len(example.sequence)))
    else:
        findings += head_finding(own, other)
    return compared_of(example, sides, modules, findings)


class Comparison:
    """Compares the generator of ``session`` with its trainer, which have the same version. ::

    comparison = Comparison(session, example, temperature=1.0)
    compared = await comparison.compare()
    """

    def __init__(self, session: Session, example: Example, *, temperature: float):
        self._session = session
        self._example = example
        self._temperature = temperature
        self._shape = shape_of(session.config.model)

    async def compare(self) -> Compared:
        """Compare weights, modules, log-probs, and the recorded log-probs."""
        positions = self._example.positions
        theirs = await self.generated(positions)
        ours = await self.trained(positions)
        findings = list[Finding]()
        if names := await self._session.differing_weights():
            text = f"{counted(len(names), 'parameter')} of the generator differ from the trainer's"
            findings.append(Finding(kind="weights", module=names[0], text=text))
        modules = module_differences(ours, theirs)
        sides = {"trainer": ours, "generator": theirs}
        if first := first_beyond_rounding(modules):
            looks = {"trainer": self.trained, "generator": self.generated}
            length = len(self._example.sequence)
            findings.append(await cause_of(first, self._shape, sides, looks, length))
        else:
            findings += head_finding(ours, theirs)
        findings += self._sampling(theirs)
        return compared_of(self._example, sides, modules, findings)

    async def cached(self, *, fresh: bool) -> Activations:
        """Return the generator's activations with the whole sequence as a prompt, of which it may
        have cached parts unless ``fresh``.
        """
        given = len(self._example.sequence) - 1
        return await self.generated(self._example.positions, fresh=fresh, given=given)

    async def generated(
        self, positions: Several[int], within: str = "", **options: int
    ) -> Activations:
        """Return the activations of the generator."""
        sequence = self._example.sequence
        given: dict[str, int] = {"given": max(1, int(np.argmax(sequence.sampled))), **options}
        return await self._session.generator_activations(
            GivenSequence(
                tokens=sequence.tokens.tolist(),
                positions=positions,
                temperature=self._temperature,
                sampling_mask=sequence.sampling_mask,
                within=within,
                **given,  # type: ignore[arg-type]
            )
        )

    async def trained(self, positions: Several[int], within: str = "") -> Activations:
        """Return the activations of the trainer."""
        return await self._session.activations(
            self._example.batch, positions, temperature=self._temperature, within=within
        )

    def _sampling(self, theirs: Activations) -> list[Finding]:
        """Return the finding that the recorded log-probs are not those of the generator now."""
        sequence = self._example.sequence
        assert theirs.logprobs is not None and theirs.logits is not None
        own = sequence.sampled & (sequence.versions == self._session.version)
        own &= ~theirs.logprobs.isnan().numpy()
        gaps = np.where(own, np.abs(theirs.logprobs.numpy() - sequence.logprobs), 0.0)
        tolerance = _tolerance(theirs)
        if gaps.max() <= tolerance:
            return []
        rows = [row for row, each in enumerate(theirs.positions) if own[each + 1]]
        following = [theirs.positions[row] + 1 for row in rows]
        temperature, left = temperature_of(
            theirs.logits[rows],
            torch.tensor(sequence.tokens[following]).long(),
            torch.tensor(sequence.logprobs[following]),
        )
        if left <= tolerance:
            text = (
                f"the recorded log-probs are those of temperature {temperature:.4g}, and the "
                f"config has {self._temperature:g}"
            )
        else:
            text = (
                f"recorded log-probs of tokens of policy version {self._session.version} differ by "
                f"{gaps.max():.3g} nats from the generator's now: it sampled with other weights, "
                "with keys of older weights, or with another kernel"
            )
        return [Finding(kind="sampling settings", module="", text=text)]


def compared_of(
    example: Example,
    sides: Mapping[str, Activations],
    modules: list[ModuleDifference],
    findings: list[Finding],
) -> Compared:
    """Return the result of a comparison of two sides by name."""
    logprobs = {name: side.logprobs for name, side in sides.items() if side.logprobs is not None}
    return Compared(example=example, logprobs=logprobs, modules=modules, findings=findings)


def head_finding(ours: Activations, theirs: Activations) -> list[Finding]:
    """Return the finding that log-probs differ although all modules before them agree."""
    assert ours.logprobs is not None and theirs.logprobs is not None
    difference = float((ours.logprobs - theirs.logprobs).abs().nan_to_num().max())
    if difference <= _tolerance(theirs):
        return []
    text = f"log-probs differ by {difference:.3g} nats, and the outputs before it agree"
    return [Finding(kind="output head", module="lm_head", text=text)]


def stale_cache(cached: Activations, fresh: Activations) -> list[Finding]:
    """Return the finding that a generator attends to keys and values of older weights.

    ``cached`` and ``fresh`` are its activations with and without its cached prefixes, right after a
    push.
    """
    first = first_beyond_rounding(module_differences(fresh, cached))
    if first is None:
        return []
    text = "after a push, the generator attends to keys and values of older weights"
    return [Finding(kind="prefix cache", module=first.name, text=text)]


async def cause_of(
    first: ModuleDifference,
    shape: ModelShape,
    sides: Mapping[str, Activations],
    looks: Mapping[str, Look],
    length: int,
) -> Finding:
    """Return the finding for the first output beyond rounding, with the side that is wrong if
    arithmetic in float64 tells. ``looks`` run a side again on the sequence of ``length`` tokens.
    """
    kind = kind_of(first.name)
    layer = ".".join(first.name.split(".")[:2])
    text = f"its output differs by {first.error:.3g}; rounding explains {first.limit:.3g}"
    if math.isinf(first.error):
        text = "only one side has this module, or its width differs"
    causes = dict[str, str]()
    if kind == "position encoding":
        causes = {name: rotation_cause(side, layer, shape) for name, side in sides.items()}
    if kind == "attention":
        rows = next(iter(sides.values())).positions
        for name, look in looks.items():
            everywhere = await look(range(length), f"{layer}.attention.")
            causes[name] = attention_cause(everywhere, layer, rows, shape)
    for name, cause in causes.items():
        if cause:
            text += f"; the {name} is wrong: {cause}"
    return Finding(kind=kind, module=first.name, text=text)


def _tolerance(side: Activations) -> float:
    return max(LOGPROB_TOLERANCES.get(dtype, 0.5) for dtype in side.dtypes.values())
