"""Data types that processes exchange."""

from collections import abc
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rl.types.batch import Batch as Batch
from rl.types.routed_experts import RoutedExperts
from rl.types.sampling_mask import SamplingMask

if TYPE_CHECKING:
    from rl.metrics import Entry

FinishReason = Literal["stop", "length"]
"""Reason for the end of sampling: a stop token or a text of ``Sampling.stop``, or
``Sampling.max_tokens``."""

EpisodeStop = Literal["done", "turns", "length", "context", "timeout"]
"""Reason for the end of an episode:

- ``done``: its environment ended it.
- ``turns``, ``length``, ``timeout``: ``max_turns``, ``max_episode_tokens`` or ``episode_s`` of its
  task was reached.
- ``context``: the model's ``max_seq_len`` was reached.
"""

MIN_TEMPERATURE = 0.01
"""Lowest temperature above 0. vLLM silently raises lower ones, which would change the log-probs."""
MAX_TEMPERATURE = 2.0
"""Highest temperature that vLLM samples at."""
MAX_TOP_LOGPROBS = 20
"""Maximum of ``top_logprobs`` and ``prompt_logprobs`` of ``Sampling``, as in OpenAI's API."""

StopReason = FinishReason | EpisodeStop
"""Reason for the end of a rollout. Only single completions have ``stop``."""

Head = Literal["logprobs", "values"]
"""Output of a model: the log-prob of each token, or the value of the state before each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Hosts and devices of a mesh. Its ranks are in order over ``hosts`` hosts, from
    ``first_host`` on.
    """

    first_host: int = 0
    hosts: int = 1
    ranks: int
    """Number of ranks on all these hosts; each host has the same number."""
    first_device: int = 0
    """First GPU of the mesh on each host; the others follow."""
    opened: tuple[int, ...] = ()
    """GPUs of other meshes on its hosts whose memory the ranks open by a handle."""

    @property
    def per_host(self) -> int:
        """Number of ranks on each host."""
        return self.ranks // self.hosts

    @property
    def devices(self) -> tuple[int, ...]:
        """GPUs of the mesh on each host, by local rank."""
        return tuple(range(self.first_device, self.first_device + self.per_host))

    @property
    def visible(self) -> tuple[int, ...]:
        """GPUs that the processes of a host see: their own first, so that a local rank is the
        number of its GPU.
        """
        return (*self.devices, *(gpu for gpu in self.opened if gpu not in self.devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt for the policy.

    ``prompt_id`` is its place in the stream of prompts of the run; every seed derives from it.
    ``answer`` is the reference that the task scores against. ``task`` is the name of the task
    in a mixture, empty without a mixture.
    """

    prompt_id: int
    tokens: list[int]
    text: str
    answer: str
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of sampling.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 mean no cut.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0
    """Number of most likely tokens whose log-probs are returned beside each sampled token."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer; the token that completes one is a part of the answer. A generator
    decodes answers with the tokenizer of ``model.hf_path``, control tokens included."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens whose log-probs are returned beside that of each prompt token;
    None for no log-probs of the prompt."""
    min_tokens: int = 0
    """Number of tokens before which no stop token is sampled."""
    json_schema: str | None = None
    """Schema of the JSON that an answer is, as JSON; None for any text. Only tokens that go on with
    such an answer are sampled, and a stop token at its end. A generator reads them with the
    tokenizer of ``model.hf_path``."""

    @property
    def is_cut(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary. Completions then have sampling
        masks.
        """
        cuts = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        is_bound = self.min_tokens > 0 or self.json_schema is not None
        return is_bound or (cuts and self.temperature > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Completion to sample; ``request_id`` is unique among the requests in flight."""

    request_id: str
    prompt_tokens: list[int]
    seed: int
    sampling: Sampling
    experts_from: int = 0
    """Number of the prompt's first tokens whose experts are not returned."""
    adapter: int = 0
    """Number of its adapter in the generator, which the session sets; 0 for none."""
    player: int | None = None
    """Number of the player of a game whose answer it is; None without players."""
    streams: bool = False
    """Whether its tokens are returned while it is sampled, which the session sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Tokens sampled for one request: three lists of one length, one entry per token.

    ``logprobs`` are log-probs under the distribution that was sampled: after the temperature and
    over what the cuts and the form of the answer left. ``versions`` are the policy versions that
    sampled each token. ``sampling_mask`` has the kept ids of each token; None if nothing was cut.
    ``top_logprobs`` has the log-probs of the most likely ids at each token, the highest first; None
    if the request did not ask for them. Ids that cannot be sampled are left out.

    ``prompt_logprobs`` are log-probs of the prompt's tokens at temperature 1 without cuts, under
    the weights that drew the first token; the first is NaN. ``prompt_top`` has the most likely ids
    at each of them, none at the first. Both are None if the request did not ask for them.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    sampling_mask: SamplingMask | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float] | None = None
    prompt_top: list[dict[int, float]] | None = None
    experts: RoutedExperts | None = None
    """Experts of the prompt's tokens and of the sampled ones; None if the generator records none.
    A sampled token's next one was drawn from the output of these."""

    @classmethod
    def written(cls, tokens: list[int]) -> "Completion":
        """Return a completion that no policy sampled: its log-probs are 0, its versions -1."""
        return cls(
            tokens=tokens,
            logprobs=[0.0] * len(tokens),
            versions=[-1] * len(tokens),
            finish_reason="stop",
            top_logprobs=[{token: 0.0} for token in tokens],
        )

    def without_mask(self) -> "Completion":
        """Return the completion without sampling mask and experts, which only trainers read."""
        return replace(self, sampling_mask=None, experts=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens of a completion that is still being sampled."""

    request_id: str
    begin: int
    """Place of the first of them; 0 again if another generator gets the request."""
    completion: Completion
    """The tokens alone. The first ones have the log-probs of the prompt; none has mask, experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSequence:
    """Tokens along which a generator computes activations."""

    tokens: abc.Sequence[int]
    given: int
    """Number of tokens of the prompt, at least 1; each later token has a decode step of its own."""
    positions: abc.Sequence[int]
    """Positions to keep; the last token of the sequence has none."""
    temperature: float = 1.0
    """Temperature of the log-probs."""
    sampling_mask: SamplingMask | None = None
    """Ids over which the log-prob of each token is normalized; None for the whole vocabulary."""
    fresh: bool = True
    """Whether to forget cached prefixes first."""

    @property
    def request(self) -> GenerationRequest:
        """The request whose completion is made to be the rest of the tokens."""
        prompt = [*self.tokens[: self.given]]
        sampling = Sampling(max_tokens=len(self.tokens) - self.given)
        return GenerationRequest(
            request_id="activations", prompt_tokens=prompt, sampling=sampling, seed=0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """Result of an episode, without its tokens."""

    text: str
    """The whole episode, decoded, for display."""
    reward: float
    """NaN if the environment gave none."""
    correct: bool
    metrics: dict[str, "Entry"]
    stop_reason: EpisodeStop
    turn_rewards: tuple[float, ...] = ()
    """Part of the reward that followed each answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTurn:
    """Tokens that an environment adds to an episode before the next answer, or its end."""

    tokens: list[int]
    end: EpisodeEnd | None = None
    is_whole: bool = False
    """Whether the history was rewritten. If so, ``tokens`` are all tokens before the next answer;
    otherwise they are the tokens after the last answer."""
    max_tokens: int | None = None
    """Maximum length of the next answer, if the environment sets one."""
    top_logprobs: int = 0
    """Number of most likely tokens whose log-probs the environment gets with the next answer."""
    stop: tuple[str, ...] = ()
    """Texts that end the next answer, as ``Sampling.stop``."""
    min_tokens: int = 0
    """As ``Sampling.min_tokens``."""
    json_schema: str | None = None
    """Form of the next answer, as ``Sampling.json_schema``."""
    player: int | None = None
    """Number of the player of a game who answers next; None without players."""
    is_replayable: bool = False
    """Whether the environment is deterministic: the same answers lead to the same tokens. Set in
    the first turn of an episode."""

    def sampling(self, default: Sampling, room: int) -> Sampling:
        """Return the parameters of the next answer, of at most ``room`` tokens, in a run with the
        ``default`` parameters.
        """
        most = min(default.max_tokens, room, self.max_tokens or room)
        return replace(
            default,
            max_tokens=most,
            top_logprobs=max(default.top_logprobs, self.top_logprobs),
            stop=self.stop,
            min_tokens=min(self.min_tokens, most),
            json_schema=self.json_schema,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """Tokens as an engine saw them: given tokens, and sampled tokens after them.

    Arrays of one length T. ``sampled`` marks the sampled tokens. For the others, ``logprobs``
    is 0 and ``versions`` is -1.
    """

    tokens: np.ndarray
    """int32 [T]."""
    sampled: np.ndarray
    """bool [T]."""
    logprobs: np.ndarray
    """float32 [T], log-prob under the distribution that was sampled, temperature included."""
    versions: np.ndarray
    """int32 [T], the policy version that sampled the token."""
    sampling_mask: SamplingMask | None = None
    """Ids that each token was sampled from; None if all were sampled from the whole vocabulary."""
    experts: RoutedExperts | None = None
    """Experts that computed each token in the generator; None if none were recorded."""

    @classmethod
    def of(cls, prompt: abc.Sequence[int], completion: Completion) -> "Sequence":
        """Return the sequence of ``completion`` after the ``prompt``."""
        before = len(prompt)
        count = before + len(completion.tokens)
        mask = completion.sampling_mask
        return cls(
            tokens=np.array([*prompt, *completion.tokens], dtype=np.int32),
            sampled=np.arange(count) >= before,
            logprobs=np.array([0.0] * before + completion.logprobs, dtype=np.float32),
            versions=np.array([-1] * before + completion.versions, dtype=np.int32),
            sampling_mask=None if mask is None else mask.placed(np.arange(before, count), count),
            experts=completion.experts,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sequence)
            and self.sampling_mask == other.sampling_mask
            and self.experts == other.experts
            and all(
                np.array_equal(getattr(self, name), getattr(other, name))
                for name in ("tokens", "sampled", "logprobs", "versions")
            )
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One episode of the policy on a prompt, with its reward.

    A single-turn completion is one sequence. Every sampled token is in exactly one sequence.
    """

    prompt: Prompt
    sample: int
    """Number among the rollouts of its prompt, from 0."""
    sequences: tuple[Sequence, ...]
    text: str
    """Sampled tokens, decoded, for display."""
    stop_reason: StopReason
    reward: float
    """Number that the policy learns from; NaN if the task gave none."""
    metrics: dict[str, "Entry"] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    """Part of ``reward`` that followed each turn; empty if only the total is known."""
    turn_lengths: tuple[int, ...] = ()
    """Number of sampled tokens of each turn, in the order of ``turn_rewards``, which is that of the
    sequences. Empty if each contiguous run of sampled tokens is a turn."""
    cut_turns: int = 0
    """Number of turns that ended at the maximum length of an answer."""
    turn_order: tuple[int, ...] = ()
    """Number of each turn in time, from 0, in the order of ``turn_rewards``. Empty if time has the
    order of the sequences."""
    players: tuple[int, ...] = ()
    """Number of the player of each sequence; empty without players."""

    @classmethod
    def single_turn(cls, prompt: Prompt, completion: Completion, **fields: Any) -> "Rollout":
        """Return the rollout of one completion; ``fields`` are all other fields."""
        sequence = Sequence.of(prompt.tokens, completion)
        reason = completion.finish_reason
        cut = int(reason == "length")
        return cls(
            prompt=prompt, sequences=(sequence,), stop_reason=reason, cut_turns=cut, **fields
        )

    @property
    def abstained(self) -> bool:
        """Whether the reward abstained: it is NaN, and nothing is learned from the rollout."""
        return self.reward != self.reward

    @property
    def sampled_count(self) -> int:
        """Number of sampled tokens."""
        return int(sum(np.count_nonzero(sequence.sampled) for sequence in self.sequences))

    @property
    def is_truncated(self) -> bool:
        """Whether an answer, or the episode, ended at a maximum number of tokens."""
        return self.cut_turns > 0 or self.stop_reason in ("length", "context")

    @property
    def turns(self) -> list[int]:
        """Number of sampled tokens of each turn, in the order of the sequences."""
        runs = (run for seq in self.sequences for run in seq.sampled.tobytes().split(b"\0"))
        return [*(self.turn_lengths or map(len, filter(None, runs)))]

    @property
    def versions(self) -> np.ndarray:
        """Policy versions of all sampled tokens, int32 [sampled_count]."""
        return np.concatenate([sequence.versions[sequence.sampled] for sequence in self.sequences])
