"""Sequences of an episode that is still running."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from rl.types import Completion, Sequence
from rl.types.routed_experts import RoutedExperts
from rl.types.sampling_mask import SamplingMask


@dataclass(eq=False)
class OpenSequence:
    """A sequence that later answers may continue: lists of equal length, as in
    :class:`rl.types.Sequence`. Tokens are only appended.
    """

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    masks: list[tuple[int, SamplingMask]] = field(default_factory=list)
    """Sampling masks of the answers that have one, and the place at which each answer begins."""
    player: int | None = None
    """Player of a game whose conversation it is."""
    experts: list[RoutedExperts] = field(default_factory=list)
    """Experts of the first tokens, in order: those that the first answer after a token was computed
    with."""

    @property
    def recorded(self) -> int:
        """Number of tokens whose experts are known."""
        return sum(map(len, self.experts))

    def feed(self, tokens: Items[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.tokens += tokens
        self.sampled += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def answer(self, completion: Completion) -> None:
        """Append an answer of the policy."""
        if completion.sampling_mask is not None:
            self.masks.append((len(self.tokens), completion.sampling_mask))
        if completion.experts is not None:  # the last token has none before it is an input
            self.experts.append(RoutedExperts(completion.experts.ids[self.recorded : -1]))
        self.tokens += completion.tokens
        self.sampled += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.versions += completion.versions

    def snapshot(self) -> Sequence:
        """Return the tokens so far as arrays."""
        mask = experts = None
        if self.masks:
            places = [np.arange(begin, begin + len(part)) for begin, part in self.masks]
            joined = SamplingMask.joined([part for _, part in self.masks])
            mask = joined.placed(np.concatenate(places), len(self.tokens))
        if self.experts:
            rest = RoutedExperts.none(len(self.tokens) - self.recorded, self.experts[0])
            experts = RoutedExperts.joined([*self.experts, rest])
        return Sequence(
            tokens=np.array(self.tokens, dtype=np.int32),
            sampled=np.array(self.sampled, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            sampling_mask=mask,
            experts=experts,
        )


class SequenceLog:
    """Sequences of an episode, from the prompts and answers of its turns.

    A turn continues the longest sequence of its player whose tokens are a prefix of the turn's
    prompt. If no such sequence exists, a new sequence begins, in which the whole prompt counts as
    not sampled. Thus each answer is marked as sampled in exactly one sequence, even if other
    prompts contain it.
    """

    def __init__(self) -> None:
        self.sequences: list[OpenSequence] = []
        """The sequences, in the order in which they began."""

    def add(
        self, prompt: Items[int], completion: Completion, player: int | None = None
    ) -> OpenSequence:
        """Append a turn; return its sequence, which ends with the answer."""
        sequence = self._continued(prompt, player)
        if sequence not in self.sequences:
            self.sequences.append(sequence)
        sequence.feed(prompt[len(sequence.tokens) :])
        sequence.answer(completion)
        return sequence

    def recorded(self, prompt: Items[int], player: int | None = None) -> int:
        """Return the number of tokens of ``prompt`` whose experts its turn need not return."""
        has_records = any(sequence.experts for sequence in self.sequences)
        return self._continued(prompt, player).recorded if has_records else 0

    def _continued(self, prompt: Items[int], player: int | None) -> OpenSequence:
        """Return the sequence that a turn with ``prompt`` continues; an empty one for none."""
        prompt = [*prompt]
        candidates = [seq for seq in self.sequences if seq.player == player]
        continued = [seq for seq in candidates if prompt[: len(seq.tokens)] == seq.tokens]
        none = OpenSequence(player=player)
        return max(continued, key=lambda seq: len(seq.tokens), default=none)
