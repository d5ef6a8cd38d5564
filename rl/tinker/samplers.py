"""Samplers of clients: what they sample from, and which samples are ready."""

import asyncio
import contextlib
import itertools
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl.errors import ConfigError, RankLost, RunError, error_text
from rl.gateway.protocol import aside, sample_seed
from rl.session.concurrency import Signal
from rl.tinker.errors import BadRequest, UserError
from rl.tinker.forward_backward import batch_of, target_logprobs
from rl.tinker.futures import Future
from rl.tinker.parts import CLONE, Parts, client_of, session_of
from rl.tinker.protocol import (
    Positive,
    Prompt,
    Samples,
    SamplingParams,
    Targets,
    Tops,
    read,
)
from rl.tinker.store import Accepted, Answer, Record
from rl.tinker.wire import MEDIA_TYPE, array_of, encode_sample, tensor_from_json, tensor_like
from rl.types import MIN_TEMPERATURE, Completion, GenerationRequest, Sampling

MAX_WAITING = 16_384
"""Number of requests that may wait."""
MAX_TARGETS = 128
"""Number of ids that a client may have scored at each token of a prompt."""
ROWS = 64
"""Number of finished samples that a client is told of at once, for it fetches them at once."""
UNUSED_S = 24 * 3600.0
"""Time without a sample after which a sampler is forgotten."""
MAX_UNNAMED = 32
"""Number of samplers of a model with weights of their own that have no name; those that were used
least recently are forgotten."""
AGAIN_S = 1.0
"""Time before a sample whose process was lost is sampled again."""
Rows = dict[int, tuple[int, dict[str, Any]]]
"""Finished samples by number: place in the order of all, and what the client is told."""
LIVES = 3
"""Number of times that a sample is tried whose process or weights are lost meanwhile."""
BEAT_S = 5.0
"""Time between looks for clients that have gone."""
SILENT = 4
"""Number of such looks without a request of a session after which its clients have gone. The SDK
sends a heartbeat every 10 s.
"""
LOST = Answer(b"", "lost")
"""Answer of a sample that was given up. Its client, if it is there, asks again."""


class Samplers:
    """Samplers of all clients. ::

    samplers.create("sess-1:sample:0", base_model="tiny", model_path=None)
    promise = samplers.ask(body, "sess-1:sample:0", seq=1, count=4)
    rows, cursor = await samplers.ready_after("sess-1:sample:0", 0, cursor=0, seconds=30)
    """

    def __init__(self, parts: Parts):
        self.running = asyncio.Event()
        """Set while the session runs."""
        self._parts = parts
        self._session = parts.session
        self._store = parts.store
        self._futures = parts.futures
        self._ready = defaultdict[str, dict[int, Rows]](dict)  # by sampler and client
        self._cursors = itertools.count(time.time_ns() // 1000)  # later processes have larger ones
        self._used: dict[str, float] = {}
        self._working = defaultdict[str, set[Future]](set)  # samples without an answer, by session
        self._polling = set[str]()  # clients that ask for all of their results at once
        self._silence = Counter[str]()
        self._listeners = Counter[str]()
        self._changed = Signal()

    async def load(self) -> None:
        """Note the samples that a process before promised, and that no client has fetched."""
        for id in await self._store.samples():
            self._resolve(self._futures.open(id, sample_sequence_ids=[]), LOST)

    # Samplers.

    def fact(self, name: str) -> Record:
        """Return the facts about a sampler. Raises BadRequest if it is unknown."""
        fact = self._store.get("sampler", name)
        self.hear(name)
        is_new = name not in self._used
        self._used[name] = time.monotonic()
        if is_new:
            self._bound()
        return fact

    def create(self, name: str, base_model: str, model_path: str | None) -> None:
        """Add a sampler of a checkpoint, or without one of the base model. A second call does
        nothing. Raises UserError if there is no such checkpoint.
        """
        if name in self._store.facts["sampler"]:
            return
        fact = {"base_model": base_model, "model_path": model_path, "folder": ""}
        if model_path:
            checkpoint = self._parts.checkpoints.find(model_path, "weights", "sampler_weights")
            fact |= {name: checkpoint[name] for name in ("base_model", "folder")}
            fact["run"] = checkpoint["model"]
        self._store.put("sampler", name, fact)

    def join(self, name: str) -> int:
        """Return the number of one more client of a sampler."""
        fact = self.fact(name)
        count: int = fact.get("clients", 0) + 1
        self._store.put("sampler", name, fact | {"clients": count})
        return count

    def expire(self) -> None:
        """Forget the samplers that were not used for long, or that are too many."""
        self._bound()
        now = time.monotonic()
        for name in [*self._store.facts["sampler"]]:
            if self._used.setdefault(name, now) + UNUSED_S < now:
                self.drop(name)

    def _bound(self) -> None:
        """Forget the samplers of each model beyond MAX_UNNAMED."""
        unnamed = defaultdict[str, list[str]](list)
        for name, fact in self._store.facts["sampler"].items():
            if fact["folder"] and not fact["model_path"]:
                unnamed[fact["run"]].append(name)
        for names in unnamed.values():
            names.sort(key=lambda name: self._used.get(name, math.inf))
            for name in names[:-MAX_UNNAMED]:
                self.drop(name)

    def drop(self, name: str) -> None:
        """Forget a sampler and its samples, and its weights unless they have a name."""
        self._parts.checkpoints.release(self._store.drop("sampler", name)["folder"])
        self._store.forget(name)
        self._used.pop(name, None)
        self._ready.pop(name, None)
        self._polling -= {client for client in self._polling if client.startswith(f"{name}:")}

    # Samples.

    def ask(self, body: bytes, name: str, seq: int, count: int) -> dict[str, Any]:
        """Return the promise of ``count`` samples, or that of the same request before. ``body`` is
        that of request ``seq`` of sampler ``name``. Raises BadRequest if too much waits.
        """
        fact = self.fact(name)
        id = f"{name}:{seq}"
        digest = self._futures.require_same(id, body)
        if known := self._futures.get(id):
            return known.promise
        if self._futures.pending >= MAX_WAITING:
            raise BadRequest(429, "too many samples wait; try again later")
        ids = [f"{id}:{number}" for number in range(count)]
        future = self._futures.open(id, sample_sequence_ids=ids)
        self._store.accept(name, Accepted(seq, "sample"), digest)
        future.task = asyncio.create_task(self._work(future, fact, body))
        self._working[session_of(name)].add(future)
        self.hear(client_of(id))
        return future.promise

    # Clients that have gone.

    def hear(self, id: str) -> None:
        """Note that a client is there; ``id`` is that of a session or of a part of it."""
        self._silence.pop(session_of(id), None)
        self._silence.pop(id, None)
        self._parts.heard[session_of(id)] = time.monotonic()

    @contextlib.contextmanager
    def listener(self, id: str) -> Iterator[None]:
        """Note that a client is there while it waits for a result."""
        ids = Counter({session_of(id), id})
        self._listeners += ids
        try:
            yield
        finally:
            self._listeners -= ids
            self.hear(id)

    def give_up(self, id: str) -> None:
        """Give up the samples of a session, of a client of a sampler, or one sample. Their answers
        are lost.
        """
        for future in [*self._working.get(session_of(id), ())]:
            task = future.task
            request_id = future.promise["request_id"]
            if task is not None and id in (session_of(id), client_of(request_id), request_id):
                future.task = None
                task.cancel()

    async def watch(self) -> None:
        """Give up the samples of sessions from which no request comes, and of clients that have
        asked for their results and no longer do.
        """
        while True:
            await asyncio.sleep(BEAT_S)
            for session, futures in [*self._working.items()]:
                clients = {client_of(future.promise["request_id"]) for future in futures}
                for id in (session, *(clients & self._polling)):
                    self._silence.update(() if self._listeners[id] else (id,))
                    if self._silence[id] >= SILENT:
                        self.give_up(id)

    def fetched(self, name: str, seq: int) -> None:
        """Note that a client has a sample, or knows that it is lost."""
        if name in self._store.facts["sampler"]:
            self._store.forget(name, seq)
            self._ready[name].get(seq // CLONE, {}).pop(seq, None)

    async def ready_after(
        self, name: str, client: int, *, cursor: int, seconds: float
    ) -> tuple[list[dict[str, Any]], int]:
        """Return the samples of a client that were ready after ``cursor``, and the new cursor.

        Waits up to ``seconds`` for one. Forgets the order of those before.
        """
        self.fact(name)
        ready = self._ready[name].setdefault(client, {})
        for seq in [*itertools.takewhile(lambda seq: ready[seq][0] <= cursor, ready)]:
            del ready[seq]
        id = client_of(f"{name}:{client * CLONE}")
        self._polling.add(id)
        with contextlib.suppress(TimeoutError), self.listener(id):
            async with asyncio.timeout(seconds):
                await self._changed.until(lambda: ready)
        rows = [*itertools.islice(ready.values(), ROWS)]
        return [row for _, row in rows], rows[-1][0] if rows else cursor

    async def _work(self, future: Future, fact: Record, body: bytes) -> None:
        try:
            arguments = await aside(len(body), lambda: read(self._sample, body))
            content = await self._sample(future.promise["sample_sequence_ids"], fact, **arguments)
            answer = Answer(content, MEDIA_TYPE)
        except (UserError, ConfigError) as error:
            answer = Answer.failure(str(error), "user")
        except asyncio.CancelledError:
            is_lost = future.task is None
            answer = LOST if is_lost else Answer.failure("the sample was cancelled", "user")
        except Exception as error:  # the server goes on
            answer = Answer.failure(error_text(error), "server")
        id = future.promise["request_id"]
        working = self._working[session_of(id)]
        working.discard(future)
        if not working:
            del self._working[session_of(id)]
            self.hear(client_of(id))
        self._resolve(future, answer)

    def _resolve(self, future: Future, answer: Answer) -> None:
        self._futures.resolve(future, answer)
        id = future.promise["request_id"]
        name, _, seq = id.rpartition(":")
        row: dict[str, Any] = {"request_id": id, "state": "failed"}
        if answer.media == MEDIA_TYPE:
            size = len(answer.content)
            row |= {"state": "finished", "response_payload_uncompressed_size": size}
        if name in self._store.facts["sampler"]:
            ready = self._ready[name].setdefault(int(seq) // CLONE, {})
            ready[int(seq)] = (next(self._cursors), row)
        self._changed.notify()

    async def _sample(
        self,
        ids: list[str],
        fact: Record,
        *,
        prompt: Prompt,
        sampling_params: SamplingParams,
        num_samples: Samples = 1,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: Tops = 0,
        topk_sample_logprobs: Tops = 0,
        target_prompt_logprobs: Targets | None = None,
        prompt_alt_tokens_k: Literal[0] = 0,
        prompt_logprobs_last_n: Positive | None = None,
        record_stability_info: bool = False,
    ) -> bytes:
        tokens = [token for chunk in prompt.chunks for token in chunk.tokens]
        sampling = self._sampling(sampling_params, tokens, topk_sample_logprobs)
        scored = prompt_logprobs or topk_prompt_logprobs > 0
        first = replace(sampling, prompt_logprobs=topk_prompt_logprobs if scored else None)
        client_seed = sampling_params.seed
        seed = secrets.randbits(62) if client_seed is None else client_seed
        requests = [
            GenerationRequest(
                request_id=id,
                prompt_tokens=tokens,
                seed=sample_seed(seed, number),
                sampling=sampling if number else first,
            )
            for number, id in enumerate(ids)
        ]
        completions = await self._complete(requests, fact, session_of(ids[0]))
        if (run := fact.get("run")) and self._parts.samples.has_room(run):
            await asyncio.to_thread(self._parts.samples.add, run, tokens, completions)
        hidden = max(1, len(tokens) - (prompt_logprobs_last_n or len(tokens)))
        scores = [math.nan] * hidden + (completions[0].prompt_logprobs or [])[hidden:]
        likely = [dict[int, float]()] * hidden + (completions[0].prompt_top or [])[hidden:]
        targets = target_prompt_logprobs
        encode = partial(
            encode_sample,
            completions,
            top=topk_sample_logprobs,
            prompt_logprobs=scores if prompt_logprobs else None,
            prompt_top=likely if topk_prompt_logprobs else None,
            prompt_k=topk_prompt_logprobs,
            target_logprobs=targets and await self._score(targets, tokens, self._weights(fact)),
        )
        sampled = sum(len(sample.tokens) for sample in completions) * (1 + topk_sample_logprobs)
        return await aside(sampled + len(tokens) * (scored + topk_prompt_logprobs), encode)

    def _sampling(self, params: SamplingParams, prompt: list[int], top: int) -> Sampling:
        """Return the parameters of a sample. Raises UserError if they cannot work."""
        longest, size = self._parts.longest, self._parts.limits.vocab_size
        if not 1 <= len(prompt) < longest or max(prompt) >= size:
            limits = f"1 to {longest - 1} tokens, each below {size}"
            raise UserError(f"the prompt has {len(prompt)} tokens; it must have {limits}")
        if 0 < params.temperature < MIN_TEMPERATURE:
            raise UserError(f"temperature must be 0 or at least {MIN_TEMPERATURE}")
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        if "" in (stops or ()):
            raise UserError("stop has an empty text; leave it out")
        if not self._parts.has_tokenizer and any(isinstance(stop, str) for stop in stops or ()):
            raise UserError("stop has a text, and this server has no tokenizer; give token ids")
        tokens = self._parts.stop_token_ids if stops is None else ()
        return Sampling(
            max_tokens=min(params.max_tokens or longest, longest - len(prompt)),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            stop_token_ids=(*tokens, *(stop for stop in stops or () if isinstance(stop, int))),
            stop=tuple(stop for stop in stops or () if isinstance(stop, str)),
            top_logprobs=top,
        )

    def _weights(self, fact: Record) -> Path | str:
        """Return the folder of a sampler's weights now, or "base"."""
        live = fact.get("model") and self._store.facts["model"][fact["model"]]["live"]
        folder = live or fact["folder"]
        return self._parts.checkpoints.at(folder) if folder else "base"

    async def _complete(
        self, requests: list[GenerationRequest], fact: Record, client: str
    ) -> list[Completion]:
        for _ in range(LIVES):
            await self.running.wait()
            weights = self._weights(fact)
            if isinstance(weights, Path) and not weights.exists():
                raise UserError("the weights of the sampler were deleted; create another sampler")
            try:
                async with self._parts.shares.of(client, len(requests)):
                    return await self._session.sample(requests, weights=weights)
            except RankLost:  # the session starts it again
                await asyncio.sleep(AGAIN_S)
            except RunError:
                if weights == self._weights(fact):  # otherwise newer ones have replaced them
                    raise
            except asyncio.CancelledError:
                await self._session.abort(*(request.request_id for request in requests))
                raise
        raise RunError(f"processes or weights were lost {LIVES} times during this sample")

    async def _score(self, targets: Targets, prompt: list[int], weights: Path | str) -> Any:
        """Return the log-probs of the ids that a client names at each token but the first."""
        message = await asyncio.to_thread(lambda: tensor_from_json(targets.model_dump()))
        limit = MAX_TARGETS * len(prompt)
        wanted = array_of(message, "target_prompt_logprobs", limit=limit, fill=-1)
        if wanted.ndim != 2 or len(wanted) != len(prompt) - 1:
            raise UserError(f"target_prompt_logprobs must have {len(prompt) - 1} rows")
        size = self._parts.limits.vocab_size
        if wanted.min(initial=0) < -1 or wanted.max(initial=0) >= size:
            raise UserError(f"target_prompt_logprobs must be below {size}, or -1")
        batch = batch_of([np.array(prompt[:-1])], [wanted])
        outputs = await self._session.forward(batch, weights=weights)
        (logprobs,) = target_logprobs(outputs, [wanted])
        return tensor_like(message, logprobs)
