"""Requests in flight in one rank's vLLM engine, and what was sampled for them so far."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl.compat import vllm_internals
from rl.errors import RunError
from rl.generation.adapter_bank import AdapterBank
from rl.generation.expert_records import ExpertRecords
from rl.metrics import Metrics, Rule, Value
from rl.types import Completion, GenerationRequest, Part
from rl.types.routed_experts import RoutedExperts
from rl.types.sampling_mask import SamplingMask, encode

MEAN_AND_MAX: tuple[Rule, ...] = ("mean", "max")
BYTES_OF_A_CHARACTER = 4  # at most, in UTF-8
LOAD = ("running", "queue", "cache")
"""Requests that run, requests that wait, and the share of the KV cache in use."""
COUNTS = ("preemptions", "prompt_tokens", "cached_tokens", "sampled_tokens")
"""Requests that lost their keys and values for lack of room in the cache; tokens of prompts; those
of them that were in the prefix cache; tokens that were sampled."""


class Loads:
    """Loads of an engine after each step: the numbers of LOAD, then those of COUNTS."""

    def __init__(self) -> None:
        self._loads: list[Sequence[float]] = [(0.0,) * (len(LOAD) + len(COUNTS))]

    def note(self, load: Sequence[float]) -> None:
        """Add the load after a step."""
        self._loads.append(load)

    def newest(self, *, is_busy: bool) -> dict[str, float]:
        """Return the newest load by name; the numbers of LOAD are 0 unless ``is_busy``."""
        load = dict(zip((*LOAD, *COUNTS), self._loads[-1], strict=True))
        return load if is_busy else load | dict.fromkeys(LOAD, 0.0)

    def take(self) -> Metrics:
        """Return the loads since the last call as metrics: mean and maximum of LOAD, preemptions,
        and the share of the tokens of prompts that the prefix cache had; nothing without a step.
        """
        before, *loads = self._loads
        self._loads = self._loads[-1:]
        if not loads:
            return Metrics({})
        entries = {
            f"generator/{name}_{rule}": Value.over([*map(float, column)], rule)
            for name, column in zip(LOAD, zip(*loads, strict=True), strict=False)
            for rule in MEAN_AND_MAX
        }
        rises = [now - then for now, then in zip(loads[-1], before, strict=True)]
        preemptions, read, cached, _ = rises[len(LOAD) :]
        entries["generator/preemptions"] = Value(preemptions, "sum")
        if read:
            entries["generator/prefix_hits"] = Value(cached / read, "mean", read)
        return Metrics(entries)


class StopTexts:
    """Texts that end an answer, searched for after each token.

    Each search decodes the end of the answer alone. It begins where it changes no character.
    """

    def __init__(self, decode: Callable[[list[int]], str], texts: Sequence[str]):
        self._decode = decode
        self._texts = texts
        self._longest = max(map(len, texts))
        self._width = max(len(text.encode()) for text in texts) + BYTES_OF_A_CHARACTER
        self._begin = 0

    def end(self, tokens: list[int]) -> bool:
        """Return whether the last of ``tokens``, the answer so far, completes one of the texts.

        The earlier tokens complete none.
        """
        text = self._decode(tokens[self._begin :])
        if any(stop in text for stop in self._texts):
            return True
        later = len(tokens) - self._width
        if later >= self._begin + self._width:
            tail = self._decode(tokens[later:])
            if len(tail) >= self._longest and text.endswith(tail):
                self._begin = later
        return False


@dataclass(slots=True, eq=False)
class _InFlight:
    """A request, and a value of each list for each token that was sampled for it."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    """Log-probs of the ``top_count`` most likely ids at each token."""
    top_count: int = 0
    masks: list[np.ndarray] | None = None
    """Rows of the sampling mask; None if the whole vocabulary is sampled from."""
    stops: StopTexts | None = None
    place: int = -1
    """Place of its adapter; -1 without one."""
    prompt_count: int | None = None
    """Number of most likely ids beside each token of the prompt; None for no log-probs of it."""
    prompt_logprobs: list[float] = field(default_factory=lambda: [math.nan])
    prompt_top: list[dict[int, float]] = field(default_factory=lambda: [{}])


class Requests:
    """Requests in flight in a ``LLMEngine`` of this process.

    They go to vLLM's scheduler directly. Preparing text, streams and statistics, as ``LLMEngine``
    does, takes as long as scheduling.
    """

    def __init__(
        self,
        engine: Any,
        vocab_size: int,
        decode: Callable[[list[int]], str],
        records: ExpertRecords | None,
        adapters: AdapterBank | None = None,
    ):
        self._engine = engine
        self._vocab_size = vocab_size
        self._decode = decode
        self._records = records
        self._adapters = adapters
        self.sampled_at = time.monotonic()
        self._numbers = itertools.count()
        self._in_flight = dict[str, _InFlight]()
        self._finished: list[tuple[str, Completion | Part]] = []
        self._cut = set[str]()  # those of the requests that need masks
        self._streams: dict[str, int] = {}  # number of tokens that were returned of each
        vllm_internals.record_masks(engine, encode, lambda: bool(self._cut))
        self.counts = Counter[str](dict.fromkeys(COUNTS, 0))
        """Numbers since the start, by the names of COUNTS."""
        vllm_internals.on_preemption(engine, lambda: self.counts.update(preemptions=1))
        if adapters is not None:
            vllm_internals.before_steps(engine, self._assign_adapters)

    def __len__(self) -> int:
        return len(self._in_flight) + len(self._finished)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request for the next step."""
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        name = str(next(self._numbers))  # an id may be used again while vLLM still clears it
        sampling = request.sampling
        in_flight = _InFlight(request.request_id, top_count=self._at_most(sampling.top_logprobs))
        if sampling.prompt_logprobs is not None:
            in_flight.prompt_count = self._at_most(sampling.prompt_logprobs)
        if self._adapters is not None:
            in_flight.place = self._adapters.place_of(request.adapter)
        schema = sampling.json_schema
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=list(sampling.stop_token_ids),
            seed=request.seed % 2**63,  # vLLM takes -1 for "no seed"
            logprobs=in_flight.top_count,  # beside that of the chosen token
            prompt_logprobs=in_flight.prompt_count,
            ignore_eos=True,
            detokenize=False,
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        )
        # an adapter that is loaded again has another number: its old keys may be of another one
        shares = str(request.adapter) if request.adapter else None
        vllm_internals.submit(self._engine, name, request.prompt_tokens, params, shares=shares)
        self._in_flight[name] = in_flight
        if self._records is not None:
            self._records.begin(name, request.experts_from)
        if sampling.is_cut:
            in_flight.masks = []
            self._cut.add(name)
        if sampling.stop:
            in_flight.stops = StopTexts(self._decode, sampling.stop)
        if request.streams:
            self._streams[name] = 0

    def _assign_adapters(self, names: list[str], counts: list[int]) -> None:
        assert self._adapters is not None, "otherwise nobody calls this"
        requests = [self._in_flight.get(name) for name in names]  # None: the request was dropped
        self._adapters.assign([-1 if ask is None else ask.place for ask in requests], counts)

    def step(self) -> list[tuple[str, Completion | Part]]:
        """Run one forward pass; return ids and completions of the requests that have finished, and
        the new tokens of those that stream.

        Raises RunError if a log-prob is not finite.
        """
        if self._in_flight:
            self._read(vllm_internals.step(self._engine))
        finished = self._finished
        self._finished = []
        return finished

    def finish_steps(self) -> None:
        """Wait until the device rests. Tokens that it sampled have the present weights' version."""
        for outputs in vllm_internals.finish_steps(self._engine):
            self._read(outputs)

    def _read(self, outputs: Any) -> None:
        """Keep the tokens of a step, and the completions that it finished."""
        if outputs.outputs:
            self.sampled_at = time.monotonic()
        counts = self.counts
        said = []
        for output in outputs.outputs:
            request = self._in_flight[output.request_id]
            reason = output.finish_reason
            if (scores := output.new_prompt_logprobs_tensors) is not None:
                request.prompt_logprobs += scores.logprobs[:, 0].tolist()
                request.prompt_top += _most_likely(scores, request.prompt_count or 0)
            if (read := output.prefill_stats) is not None:
                counts["prompt_tokens"] += read.num_prompt_tokens
                counts["cached_tokens"] += read.num_cached_tokens
            if new := output.new_token_ids:
                counts["sampled_tokens"] += len(new)
                request.tokens += new
                request.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
                request.versions += [int(outputs.weight_version)] * len(new)
                if request.top_count:
                    request.top += _most_likely(output.new_logprobs, request.top_count)
                if request.masks is not None:
                    request.masks += vllm_internals.rows_of(output)
                if request.stops is not None and request.stops.end(request.tokens):
                    reason = "stop"
                    said.append(output.request_id)
            if reason is not None:
                del self._in_flight[output.request_id]
                self._cut.discard(output.request_id)
                self._streams.pop(output.request_id, None)
                experts = None
                if self._records is not None:
                    experts = self._records.end(output.request_id, len(request.tokens))
                self._finished.append((request.request_id, _completion(request, reason, experts)))
        vllm_internals.abort(self._engine, said)  # those that vLLM has ended itself are ignored
        for name, begin in self._streams.items():
            request = self._in_flight[name]
            if len(request.tokens) > begin:
                self._streams[name] = len(request.tokens)
                new = _completion(request, None, None, begin)
                part = Part(request_id=request.request_id, begin=begin, completion=new)
                self._finished.append((request.request_id, part))

    def abort(self, request_ids: list[str]) -> None:
        """Drop these requests; ids that are not in flight are ignored."""
        dropped = set(request_ids)
        names = [name for name, request in self._in_flight.items() if request.request_id in dropped]
        for name in names:
            del self._in_flight[name]
            self._cut.discard(name)
            self._streams.pop(name, None)
            if self._records is not None:
                self._records.drop(name)
        vllm_internals.abort(self._engine, names)

    def _at_most(self, count: int) -> int:
        return min(count, self._vocab_size)


def _most_likely(scores: Any, count: int) -> list[dict[int, float]]:
    """Return the log-probs of the ``count`` most likely ids at each token of vLLM's
    ``LogprobsLists`` or ``LogprobsTensors``. Its first column is the token itself; it may have more
    columns, for another request.
    """
    columns = slice(1, 1 + count)
    ids, logprobs = scores.logprob_token_ids[:, columns], scores.logprobs[:, columns]
    return [
        {token: value for token, value in zip(*row, strict=True) if value > -math.inf}
        for row in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]


def _completion(
    sampled: _InFlight, reason: Any, experts: RoutedExperts | None, begin: int = 0
) -> Completion:
    """Return the tokens from ``begin`` on, which without a ``reason`` are not the last ones."""
    logprobs = sampled.logprobs[begin:]
    prompt = [] if begin else sampled.prompt_logprobs
    prompt_count = None if begin else sampled.prompt_count
    if not all(map(math.isfinite, [*logprobs, *prompt[1:]])):
        wrong = f"log-probs of policy version {sampled.versions[-1]} are not finite"
        raise RunError(f"request {sampled.request_id!r}: {wrong}")
    masks = None if reason is None else sampled.masks
    if masks is not None and len(masks) != len(sampled.tokens):
        wrong = f"vLLM returned {len(masks)} sampling masks for {len(sampled.tokens)} tokens"
        raise RunError(f"request {sampled.request_id!r}: {wrong}")
    # vLLM's "error": the tokenizer has no word that goes on with the form of the answer
    ended = "length" if reason is None or str(reason) == "error" else str(reason)
    return Completion(
        tokens=sampled.tokens[begin:],
        logprobs=logprobs,
        versions=sampled.versions[begin:],
        finish_reason=ended,  # type: ignore[arg-type]
        sampling_mask=None if masks is None else SamplingMask.of_rows(masks),
        top_logprobs=sampled.top[begin:] if sampled.top_count else None,
        prompt_logprobs=None if prompt_count is None else prompt,
        prompt_top=sampled.prompt_top if prompt_count else None,
        experts=experts,
    )
