"""Comparison of two sides of a run, module by module: trainer and generator, or two layouts."""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from collections.abc import Sequence as Several
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from rl.compare.differences import (
    Finding,
    ModuleDifference,
    differing_experts,
    first_beyond_rounding,
    kind_of,
    layer_of,
    module_differences,
    temperature_of,
)
from rl.errors import counted
from rl.model.activations import Activations
from rl.observe.rollout_files import Chunk
from rl.replay.replay import ReplayedStep, RolloutReplay
from rl.session.session import Session
from rl.session.session_config import SessionConfig
from rl.types import Batch, GivenSequence, Rollout, Sequence

WORST = 16
"""Number of tokens whose log-probs differ most at which modules are compared."""

SPREAD = 32
"""Number of further tokens, evenly spread, at which modules are compared."""

LOGPROB_TOLERANCES = {torch.float32: 1e-3}
"""Difference of a log-prob, in nats, that rounding may cause; 0.5 in all other types."""


def comparable(config: SessionConfig) -> SessionConfig:
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


def with_layout(config: SessionConfig, degrees: Mapping[str, int]) -> SessionConfig:
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
        return sorted({at for at in (*before, *spread, 0, 1, 2) if 0 <= at <= last})

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
    examples = list[Example]()
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
            longest = max(options, key=lambda example: len(example.sequence))
            examples.append(replace(longest, number=len(examples)))
    return examples


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Result of a comparison of two models on one sequence."""

    example: Example
    logprobs: dict[str, torch.Tensor]
    """Log-probs of the tokens by model, float32 [T]; NaN for given tokens."""
    modules: list[ModuleDifference]
    findings: list[Finding]
    """Differences beyond rounding, the first cause first."""
    rerouted: dict[str, str]
    """Number of tokens that go to other experts, as a text, by layer."""

    def by_layer(self) -> dict[str, ModuleDifference]:
        """Return the largest difference of each layer, in the order of execution."""
        largest: dict[str, ModuleDifference] = {}
        for module in self.modules:
            layer = layer_of(module.name)
            largest[layer] = max(largest.get(layer, module), module, key=lambda one: one.error)
        return largest


@asynccontextmanager
async def loaded_before(
    replay: RolloutReplay, session: Session, step: int
) -> AsyncIterator[AsyncGenerator[ReplayedStep]]:
    """Bring ``session`` to the weights before ``step``; yield the steps from ``step`` on."""
    await replay.load(session)
    async with aclosing(replay.steps(session)) as steps:
        for _ in range(replay.first, step - 1):
            await anext(steps)
        yield steps


@dataclass(frozen=True)
class Comparison:
    """Compares the generator of ``session`` with its trainer, which have the same version. ::

    comparison = Comparison(session, example, temperature=1.0)
    compared = await comparison.compare()

    """

    session: Session
    example: Example
    temperature: float
    recorded: torch.dtype = torch.float32
    """Dtype of the generator that sampled the example."""

    async def compare(self) -> Compared:
        """Compare weights, modules, log-probs, and the recorded log-probs."""
        theirs = await self._generated()
        compared = compared_of(self.example, {"trainer": await self.trained(), "generator": theirs})
        weights = list[Finding]()
        if names := await self.session.differing_weights():
            text = f"{counted(len(names), 'parameter')} of the generator differ from the trainer's"
            weights.append(Finding(kind="weights", module=names[0], text=text))
        findings = [*weights, *compared.findings, *self._sampling(theirs)]
        return replace(compared, findings=findings)

    async def cached(self, *, fresh: bool) -> Activations:
        """Return the generator's activations with the whole sequence as a prompt, of which it may
        have cached parts unless ``fresh``.
        """
        return await self._generated(fresh=fresh, given=len(self.example.sequence) - 1)

    async def _generated(self, *, fresh: bool = True, given: int | None = None) -> Activations:
        """Return the activations of the generator."""
        sequence = self.example.sequence
        return await self.session.generator_activations(
            GivenSequence(
                tokens=sequence.tokens.tolist(),
                given=max(1, int(np.argmax(sequence.sampled))) if given is None else given,
                positions=self.example.positions,
                temperature=self.temperature,
                sampling_mask=sequence.sampling_mask,
                fresh=fresh,
            )
        )

    async def trained(self) -> Activations:
        """Return the activations of the trainer."""
        example = self.example
        return await self.session.activations(
            example.batch, example.positions, temperature=self.temperature
        )

    def _sampling(self, theirs: Activations) -> list[Finding]:
        """Return the finding that the recorded log-probs are not those of the generator now."""
        sequence = self.example.sequence
        assert theirs.logprobs is not None and theirs.logits is not None
        is_current = sequence.sampled & (sequence.versions == self.session.version)
        is_current &= ~theirs.logprobs.isnan().numpy()
        gaps = np.where(is_current, np.abs(theirs.logprobs.numpy() - sequence.logprobs), 0.0)
        tolerance = _tolerance(theirs, self.recorded)
        if gaps.max() <= tolerance:
            return []
        rows = [row for row, position in enumerate(theirs.positions) if is_current[position + 1]]
        following = [theirs.positions[row] + 1 for row in rows]
        temperature, left = temperature_of(
            theirs.logits[rows],
            torch.tensor(sequence.tokens[following]).long(),
            torch.tensor(sequence.logprobs[following]),
        )
        if left <= tolerance:
            text = (
                f"the recorded log-probs are those of temperature {temperature:.4g}, and the "
                f"config has {self.temperature:g}"
            )
        else:
            text = (
                f"recorded log-probs of tokens of policy version {self.session.version} differ by "
                f"{gaps.max():.3g} nats from the generator's now: it sampled with other weights, "
                "with keys of older weights, or with another kernel"
            )
        return [Finding(kind="sampling settings", module="", text=text)]


def compared_of(example: Example, sides: Mapping[str, Activations]) -> Compared:
    """Return the comparison of two sides, by name, on the same weights."""
    ours, theirs = sides.values()
    modules = module_differences(ours, theirs)
    rerouted = differing_experts(ours, theirs)
    if first := first_beyond_rounding(modules):
        text = f"its output differs by {first.error:.3g}; rounding explains {first.limit:.3g}"
        if math.isinf(first.error):
            text = "only one side has this module, or its width differs"
        if layer_of(first.name) in rerouted and kind_of(first.name) == "routing":
            text += f"; {rerouted[layer_of(first.name)]}"
        findings = [Finding(kind=kind_of(first.name), module=first.name, text=text)]
    else:
        assert ours.logprobs is not None and theirs.logprobs is not None
        difference = float((ours.logprobs - theirs.logprobs).abs().nan_to_num().max())
        text = f"log-probs differ by {difference:.3g} nats, and the outputs before it agree"
        head = Finding(kind="output head", module="lm_head", text=text)
        findings = [head] if difference > _tolerance(theirs) else []
    logprobs = {name: side.logprobs for name, side in sides.items() if side.logprobs is not None}
    return Compared(
        example=example,
        logprobs=logprobs,
        modules=modules,
        findings=findings,
        rerouted=rerouted,
    )


def stale_cache_findings(cached: Activations, fresh: Activations) -> list[Finding]:
    """Return the finding that a generator attends to keys and values of older weights.

    ``cached`` and ``fresh`` are its activations with and without its cached prefixes, right after a
    push.
    """
    first = first_beyond_rounding(module_differences(fresh, cached))
    if first is None:
        return []
    text = "after a push, the generator attends to keys and values of older weights"
    return [Finding(kind="prefix cache", module=first.name, text=text)]


def _tolerance(side: Activations, *others: torch.dtype) -> float:
    dtypes = (*side.dtypes.values(), *others)
    return max(LOGPROB_TOLERANCES.get(dtype, 0.5) for dtype in dtypes)
