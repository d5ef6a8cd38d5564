"""Agents with the habits of real ones, and a policy that answers them."""

import asyncio
import contextlib
import itertools
import json
import math
import random

from openai import AsyncOpenAI

from rl.dialects.qwen3 import Qwen3Dialect
from rl.gateway.answers import sliced
from rl.gateway.gateway import Gateway
from rl.gateway.http import serving
from rl.gateway.protocol import Limits
from rl.types import Completion, Part, Sampling
from tests.kit.adversary import Adversary
from tests.kit.conversations import TOOL
from tests.kit.tokenizers import qwen3

LONGEST = 4000
HABITS = ("plain", "odd tokens", "spacing", "key order", "several calls", "thinking, cut")
KINDS = ("none", "drops thoughts", "respells arguments", "repairs arguments", "compacts", "renames")


class Policy:
    """Policy that answers as an adversary; it keeps each request and completion. It says some
    tokens before others, unless it ``is_silent``.
    """

    def __init__(self, habits=HABITS, seed=0, *, is_silent=False):
        self._rng = random.Random(seed)
        self._is_silent = is_silent
        self._habits = habits
        self._adversary = Adversary(qwen3(), self._rng, True)
        self._versions = itertools.count()
        self.turns = []

    async def __call__(self, ask):
        completion = self.completion(ask, self.answer())
        if ask.on_tokens and not self._is_silent:
            for part in parts_of(completion):
                ask.on_tokens(part)
                await asyncio.sleep(0)
        self.turns.append((ask, completion))
        return completion

    def answer(self):
        return self._adversary.answer(self._rng.choice(self._habits))

    def completion(self, ask, answer):
        """Return an answer as its request wants it."""
        tokens = ended(answer, ask.sampling.stop)[: ask.sampling.max_tokens]
        version = next(self._versions)
        return Completion(
            tokens=tokens,
            logprobs=[-float(version) - n for n in range(len(tokens))],
            versions=[version] * len(tokens),
            finish_reason="length" if len(tokens) == ask.sampling.max_tokens else "stop",
            top_logprobs=top_of(tokens, ask.sampling.top_logprobs),
            **prompt_of(ask),
        )


def parts_of(completion):
    """Yield parts of a completion as a generator does: without the last token."""
    sizes = itertools.cycle([1, 1, 2, 3, 1, 7])
    begin = 0
    last = len(completion.tokens) - 1
    while begin < last:
        end = min(begin + next(sizes), last)
        part = sliced(completion.without_mask(), begin, end)
        yield Part(request_id="r", begin=begin, completion=part)
        begin = end


def ended(answer, stops):
    """Return an answer up to the token that completes one of the texts, as a generator does."""
    ends = range(1, len(answer))
    found = (end for end in ends if any(stop in qwen3().decode(answer[:end]) for stop in stops))
    return answer[: next(found, len(answer))]


def prompt_of(ask):
    """Return made-up log-probs of the prompt."""
    count = ask.sampling.prompt_logprobs
    if count is None:
        return {}
    logprobs = [math.nan, *(-float(place) for place, _ in enumerate(ask.tokens[1:], 1))]
    top = [{}, *top_of(ask.tokens[1:], count)] if count else None
    return {"prompt_logprobs": logprobs, "prompt_top": top}


def top_of(tokens, count):
    """Return made-up log-probs of ``count`` tokens at each place; None for no tokens."""
    if not count:
        return None
    return [{token + more: -0.5 - more for more in range(count)} for token in tokens]


def make_gateway(policy, **options):
    limits = Limits(**options.pop("limits", {}))
    dialect = options.pop("dialect", None) or Qwen3Dialect(qwen3())
    return Gateway(
        policy,
        dialect,
        sampling=Sampling(max_tokens=200),
        longest=LONGEST,
        vocab_size=len(dialect.tokenizer),
        limits=limits,
        **{"model": "policy"} | options,
    )


@contextlib.asynccontextmanager
async def server(policy, *, key=None, **options):
    """Yield a gateway, its URL and a client of it."""
    gateway = make_gateway(policy, **options)
    async with (
        serving(gateway, key=key) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0) as client,
    ):
        yield gateway, url, client


@contextlib.asynccontextmanager
async def session(policy, **options):
    """Yield a client of a session, and the capture of the session."""
    async with server(policy, **options) as (gateway, url, client):
        name = gateway.open_session()
        yield client.with_options(base_url=f"{url}/sessions/{name}/v1"), gateway.capture(name)


async def collected(answer):
    """Return an answer, or what its stream yields."""
    return [chunk async for chunk in answer] if hasattr(answer, "__aiter__") else [answer]


def joined(chunks):
    """Return the choices of an answer, or of its stream, by their index: texts, calls without ids,
    tokens, log-probs and the reason for the end.
    """
    found = {}
    for chunk in chunks:
        for row in chunk.model_dump(exclude_none=True)["choices"]:
            own = found.setdefault(row.pop("index"), {})
            add(own, row | row.pop("delta", row.pop("message", {})))
    return [found[index] for index in sorted(found)]


def add(own, row):
    """Add the fields of a row to those before: texts and lists grow."""
    for name, value in row.items():
        if name == "tool_calls":
            assert all(
                call.pop("index", place) == place
                for place, call in enumerate(value, len(own.get(name, [])))
            )
            assert all(call.pop("id").startswith("call_") for call in value)
        if isinstance(value, dict):
            add(own.setdefault(name, {}), value)
        elif isinstance(value, str | list) and name not in (
            "role",
            "finish_reason",
            "prompt_token_ids",
        ):
            if value:
                own[name] = own.get(name, type(value)()) + value
        else:
            assert own.setdefault(name, value) == value


async def act(client, kind, turns=6, **options):
    """Talk to the policy for some turns, with a habit of real agents."""
    messages = [{"role": "system", "content": "You add."}, {"role": "user", "content": "1 + 2?"}]
    for turn in range(turns):
        said = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL], **options
        )
        message = said.choices[0].message
        sent = message.model_dump(exclude_none=True)
        calls = sent.get("tool_calls", [])
        if kind == "drops thoughts":
            sent.pop("reasoning_content", None)
        for call in calls:
            function = call["function"]
            if kind == "respells arguments":
                function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=3)
            if kind == "repairs arguments":
                function["arguments"] = '{"a": 1, "b": 2}'
        messages.append(sent)
        messages += [{"role": "tool", "tool_call_id": each["id"], "content": "3"} for each in calls]
        if not calls:
            messages.append({"role": "user", "content": [{"type": "text", "text": "Go on."}]})
        if kind == "compacts" and turn == 2:
            messages = [*messages[:2], {"role": "user", "content": "So far: 3."}]
        if kind == "renames":
            messages[0] = {"role": "developer", "content": f"You add. It is {turn}."}
