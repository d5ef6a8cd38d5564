"""Streams: what they say before the end, and that it is what the whole answer says."""

import asyncio
import itertools
import random

import openai
import pytest

from rl.dialects.answers import TextReader
from rl.dialects.choose import dialect_of
from tests.dialects.test_families import FAMILIES
from tests.gateway.test_http import CHAT
from tests.kit.adversary import HABITS, Adversary
from tests.kit.agents import Policy, collected, joined, parts_of, server, session
from tests.kit.tables import cases, long
from tests.kit.tokenizers import chatml_mistral, mistral, qwen3, qwen3_instruct

MAKERS = {name: make for name, (make, _) in FAMILIES.items()}
MAKERS |= {"Qwen3": qwen3, "Qwen3 Instruct": qwen3_instruct}
OFTEN = ("Qwen3", "Llama 3")
"""Tokenizers of the default tests, which write calls in two ways."""
BARE = '{"name": "add", "parameters": {"a": 1}}'
LIST = '[{"name": "add", "arguments": {"a": 1}, "id": "a1B2c3D4e"}]'
TEXTS = (
    *("", " ", "Well.", "  One.\n\n Two. ", "né 你好 🎉🎉 “so”…"),
    *(f"I add. [TOOL_CALLS]{LIST}", f"[TOOL_CALLS]{LIST}"),
    *(BARE, f" {BARE} ", "{not a call}", f"[1, 2] {BARE}"),
    *(f"<|python_tag|>{BARE}", f"So: <|python_tag|>{BARE}"),
    "<think>\nHm, <tool_call> maybe.\n</think>\n\nNo.",
    *("<think>a", "<think></think>", "<think>a</think>b<think>c</think>d"),
)
CHATS = (
    {},
    {"stop": ["al", "ll.", " is"]},
    {"stop": [". ", "aab"], "logprobs": True},
    {"parallel_tool_calls": False, "logprobs": True, "top_logprobs": 2},
    {"max_tokens": 9, "extra_body": {"return_token_ids": True}},
)
COMPLETIONS = (
    {"logprobs": 2, "extra_body": {"return_token_ids": True}},
    {"echo": True, "logprobs": 0, "stop": [" is", "o \n"]},
    {"echo": True, "stop": "a"},
    {"max_tokens": 7, "logprobs": 0},
)

RESPONSES = (
    "The answer is 42.",
    "<think>\nlet me add\n</think>\n\nThe answer is 42.",
    "",
    '<think>\na\n</think>\n\nSo: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
)


class Told(Policy):
    """Policy that gives each answer twice."""

    def __init__(self, answers):
        super().__init__()
        self._versions = itertools.repeat(0)
        self._answers = itertools.chain.from_iterable([each] * 2 for each in answers)

    def answer(self):
        return next(self._answers)


def answers_of(tokenizer, count):
    """Return the tokens of answers with oddities, among them bytes that are not text."""
    rng = random.Random(0)
    adversary = Adversary(tokenizer, rng, True)
    answers = [adversary.answer(rng.choice(HABITS)) for _ in range(count)]
    ended = [
        adversary.split(text) + adversary.encode(rng.choice(["", "<|im_end|>"])) for text in TEXTS
    ]
    words = [*set(range(len(tokenizer))) - {*tokenizer.added_tokens_decoder}]
    is_byte = lambda token: "\ufffd" in tokenizer.decode([token])  # noqa: E731
    bytes_alone = [word for word in words if is_byte(word)]
    junk = [rng.choices(bytes_alone, k=5) + rng.choices(words, k=5) for _ in range(count)]
    return [answer for answer in (*answers, *ended, *junk) if answer]


@pytest.mark.parametrize("name", cases(MAKERS, OFTEN))
async def test_a_stream_of_a_chat_says_what_the_whole_answer_says(name):
    answers = answers_of(MAKERS[name](), 6)
    policy = Told(answers)
    early = 0
    async with server(policy, dialect=dialect_of(MAKERS[name]())) as (_, _, client):
        for _, options in zip(answers, itertools.cycle(CHATS)):
            create = client.chat.completions.create
            whole = await create(**CHAT, **options)
            chunks = await collected(await create(**CHAT, stream=True, **options))
            assert joined(chunks) == joined([whole]), policy.turns[-1]
            assert chunks[0].choices[0].delta.role == "assistant"
            given = [getattr(each, "prompt_token_ids", None) for each in (whole, chunks[0])]
            assert given[0] == given[1]
            reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
            assert [*map(bool, reasons)] == [False] * (len(reasons) - 1) + [True]
            early += len(chunks) > 3
    assert early > len(answers) / 3


@pytest.mark.parametrize("name", ["Qwen3", long("Mistral")])
async def test_a_stream_of_a_completion_says_what_the_whole_answer_says(name):
    answers = answers_of(MAKERS[name](), 10)
    policy = Told(answers)
    async with server(policy, dialect=dialect_of(MAKERS[name]())) as (_, _, client):
        for _, options in zip(answers, itertools.cycle(COMPLETIONS)):
            asked = {"model": "policy", "prompt": "1 + 2 =", **options}
            whole = await client.completions.create(**asked)
            chunks = await collected(await client.completions.create(**asked, stream=True))
            assert joined(chunks) == joined([whole]), policy.turns[-1]


@pytest.mark.parametrize("make", [qwen3, long(mistral), long(chatml_mistral)])
def test_text_that_was_read_is_never_changed(make):
    """Bytes that are not text change the characters of bytes before them."""
    tokenizer = make()
    for tokens in answers_of(tokenizer, 25):
        reader = TextReader(tokenizer)
        for place, token in enumerate(tokens, 1):
            reader.read(token)
            for end in range(place, len(tokens) + 1):
                assert tokenizer.decode(tokens[:end]).startswith(reader.text)


class Waiting(Policy):
    """Policy that waits to be let go before the last token of its answers."""

    def __init__(self):
        super().__init__(["no call"])
        self.let_go = asyncio.Event()
        self.given_up = asyncio.Event()

    async def __call__(self, ask):
        completion = await super().__call__(ask)
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        return completion


@pytest.mark.parametrize("path", ["chat", "completions", "responses"])
async def test_text_comes_before_the_answer_ends(path):
    """A client that leaves then ends its answer."""

    policy = Waiting()
    async with asyncio.timeout(120), server(policy) as (_, _, client):
        if path == "chat":
            stream = await client.chat.completions.create(**CHAT, n=2, stream=True)
        elif path == "completions":
            stream = await client.completions.create(model="policy", prompt="1", n=2, stream=True)
        else:
            stream = await client.responses.create(model="policy", input="1", stream=True)
        texts = set()
        async for chunk in stream:
            for choice in getattr(chunk, "choices", ()):
                text = choice.delta.content if path == "chat" else choice.text
                texts |= {choice.index} if text else set()
            texts |= {0, 1} if getattr(chunk, "type", "") == "response.output_text.delta" else set()
            if texts == {0, 1}:
                break
        assert not policy.let_go.is_set()
        await stream.close()
        await policy.given_up.wait()


async def test_a_session_samples_the_answer_of_a_client_that_left_to_its_end():
    policy = Waiting()
    async with asyncio.timeout(120), session(policy) as (client, capture):
        stream = await client.chat.completions.create(**CHAT, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        policy.let_go.set()
        again = await collected(
            await client.chat.completions.create(
                **CHAT, stream=True, extra_headers={"x-stainless-retry-count": "1"}
            )
        )
        ((_, completion),) = policy.turns
        assert capture.turns == 1
        assert len(again) > 2
        assert joined(again)[0]["content"] == "The answer is 42."
        assert sum(capture.log.sequences[0].sampled) == len(completion.tokens)


class Lost(Policy):
    """Policy whose first generator is lost after some tokens. The second one says ``more``."""

    def __init__(self, more):
        super().__init__()
        self._more = more

    async def __call__(self, ask):
        first = self.completion(ask, qwen3().encode("The answer is 42, or so I think."))
        for part in [*parts_of(first)][:-1]:
            ask.on_tokens(part)
            await asyncio.sleep(0.01)
        completion = self.completion(ask, qwen3().encode(self._more))
        for part in parts_of(completion):
            ask.on_tokens(part)
            await asyncio.sleep(0)
        return completion


async def test_an_answer_that_is_sampled_again_goes_on_in_its_stream():
    more = "The answer is 42, or so I think."
    async with server(Lost(more)) as (_, _, client):
        chunks = await collected(await client.chat.completions.create(**CHAT, stream=True))
    assert joined(chunks)[0]["content"] == more


@pytest.mark.parametrize("more", ["The answer was 43, or so I think.", "The"])
async def test_an_answer_that_is_sampled_again_with_other_tokens_ends_its_stream(more):
    said = ""
    async with server(Lost(more)) as (_, _, client):
        with pytest.raises(openai.APIError, match="sampled again with other tokens"):
            async for chunk in await client.chat.completions.create(**CHAT, stream=True):
                said += chunk.choices[0].delta.content or ""
    assert said and "The answer is 42, or so I think.".startswith(said)


async def test_a_streamed_response_has_the_events_of_the_api():
    policy = Told([qwen3().encode(text + "<|im_end|>") for text in RESPONSES])
    async with server(policy) as (_, _, client):
        for _ in RESPONSES:
            whole = await client.responses.create(model="policy", input="1 + 2?")
            kinds = []
            async with client.responses.stream(model="policy", input="1 + 2?") as stream:
                texts = ""
                async for event in stream:
                    assert event.sequence_number == len(kinds)
                    kinds.append(event.type.removeprefix("response."))
                    if kinds[-1] == "output_text.delta":
                        texts += event.delta
                final = await stream.get_final_response()
            assert texts == final.output_text == whole.output_text
            shown = [each.model_dump(exclude={"id", "call_id"}) for each in whole.output]
            found = [each.model_dump(exclude={"id", "call_id"}) for each in final.output]
            for each in found:
                each.pop("parsed_arguments", None)
                for part in each.get("content", ()):
                    part.pop("parsed", None)
            assert found == shown
            assert final.usage == whole.usage
            assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
            for item in ("output_item", "content_part"):
                assert kinds.count(f"{item}.added") == kinds.count(f"{item}.done")
            assert kinds.count("output_item.done") == len(final.output)
        assert kinds.count("function_call_arguments.done") == 1
