"""Answers of the gateway: calls, texts that end them, log-probs, tokens."""

import asyncio
import itertools
import json

import pytest

from rl.types import Completion
from tests.dialects.conversations import TOOL
from tests.gateway.agents import LONGEST, Policy, server
from tests.gateway.test_http import CHAT, GENERATE, MESSAGES, post
from tests.tiny_tokenizers import qwen3


def test_an_overflow_is_said_in_the_words_that_client_libraries_look_for():
    """litellm looks for the first words, langchain for the second, opencode for the last."""
    ((_, answer),) = post([("/v1/completions", {"prompt": "a " * LONGEST})])
    said = answer["error"]["message"]
    assert said.startswith(f"This model's maximum context length is {LONGEST} tokens. However, ")
    assert "prompt is too long" in said
    assert "Please reduce the length of the messages" in said


def test_tool_calls_of_a_conversation_without_a_session_have_ids_of_their_own():
    async def work():
        async with server(Policy(["several calls"])) as (_, _, client):
            answers = [
                await client.chat.completions.create(**CHAT, tools=[TOOL], n=2) for _ in range(2)
            ]
            calls = [
                call.id
                for answer in answers
                for choice in answer.choices
                for call in choice.message.tool_calls
            ]
            assert len({*calls}) == len(calls) >= 8

    asyncio.run(work())


def test_an_answer_without_parallel_calls_ends_with_its_first_call():
    async def work():
        policy = Policy(["several calls"])
        async with server(policy) as (gateway, url, client):
            name = gateway.open_session()
            own = client.with_options(base_url=f"{url}/sessions/{name}/v1")
            messages = [*MESSAGES]
            for _ in range(3):
                said = await own.chat.completions.create(
                    model="policy", messages=messages, tools=[TOOL], parallel_tool_calls=False
                )
                message = said.choices[0].message
                (call,) = message.tool_calls
                assert said.choices[0].finish_reason == "tool_calls"
                messages.append(message.model_dump(exclude_none=True))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
            (sequence,) = gateway.capture(name).log.sequences
            said = list(itertools.compress(sequence.tokens, sequence.sampled))
            assert qwen3().decode(said).count("</tool_call>") == 3
            assert qwen3().decode(sequence.tokens).count("<tool_response>") == 2
            assert len(said) < sum(len(completion.tokens) for _, completion in policy.turns)

    asyncio.run(work())


class Caller(Policy):
    """Policy that ends the call that its prompt begins."""

    async def __call__(self, ask):
        text = qwen3().decode(ask.tokens)
        rest = ' {"a": 1}}\n' if text.endswith('"arguments":') else 'add", "arguments": {"a": 1}}\n'
        tokens = qwen3().encode(rest + "</tool_call><|im_end|>")
        completion = Completion.written(tokens)
        self.turns.append((ask, completion))
        return completion


@pytest.mark.parametrize("name", [None, TOOL["function"]["name"]])
@pytest.mark.parametrize("thinks", [True, False])
def test_a_tool_call_can_be_forced_and_continued(name, thinks):
    choice = {"type": "function", "function": {"name": name}} if name else "required"
    options = {"tools": [TOOL], "tool_choice": choice}
    options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": thinks}}

    async def work():
        policy = Caller()
        async with server(policy) as (gateway, url, client):
            session = gateway.open_session()
            own = client.with_options(base_url=f"{url}/sessions/{session}/v1")
            messages = [*MESSAGES]
            for _ in range(3):
                said = await own.chat.completions.create(
                    model="policy", messages=messages, **options
                )
                message = said.choices[0].message
                (call,) = message.tool_calls
                assert json.loads(call.function.arguments) == {"a": 1}
                messages.append(message.model_dump(exclude_none=True))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
            (sequence,) = gateway.capture(session).log.sequences
            sampled = [token for _, completion in policy.turns for token in completion.tokens]
            assert list(itertools.compress(sequence.tokens, sequence.sampled)) == sampled

    asyncio.run(work())


STOPS = [("answer", "The"), (["42", "is "], "The answer"), ("never", "The answer is 42.")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "said"), STOPS)
def test_an_answer_ends_before_a_stop_text(stop, said, stream):
    async def work():
        policy = Policy(["no call"])
        async with server(policy) as (gateway, url, client):
            name = gateway.open_session()
            own = client.with_options(base_url=f"{url}/sessions/{name}/v1")
            for chat in (True, False):
                found, reason, count = await ask(own, chat)
                assert found.strip().endswith(said)
                assert reason == "stop"
                assert count <= len(policy.turns[-1][1].tokens)
                assert (count == len(policy.turns[-1][1].tokens)) == (stop == "never")
            sequences = gateway.capture(name).log.sequences
            assert [sum(sequence.sampled) for sequence in sequences][-1] == count

    async def ask(client, chat):
        options = {"model": "policy", "stop": stop, "stream": stream}
        if stream:
            options["stream_options"] = {"include_usage": True}
        if chat:
            answer = await client.chat.completions.create(messages=MESSAGES, **options)
        else:
            answer = await client.completions.create(prompt="1 + 2 =", **options)
        chunks = [chunk async for chunk in answer] if stream else [answer]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        parts = [getattr(each, "delta", getattr(each, "message", each)) for each in choices]
        found = "".join((each.content if chat else each.text) or "" for each in parts)
        return found, choices[-1].finish_reason, chunks[-1].usage.completion_tokens

    asyncio.run(work())


def test_tokens_have_both_spellings_of_their_ids():
    policy = Policy(["plain"])
    params = {"max_tokens": 5, "logprobs": 1, "extra_args": {"session": "known"}, "n": 2}
    params["stop_token_ids"] = [3, 4]
    for name in ("token_ids", "prompt_token_ids"):
        body = {name: [1, 2], "sampling_params": params, "cache_salt": "version 3"}
        ((_, answer),) = post([(GENERATE, body)], policy=policy)
        assert answer["prompt_token_ids"] == [1, 2]
        for choice, (ask, completion) in zip(answer["choices"], policy.turns[-2:], strict=True):
            assert ask.session == "known"
            assert ask.sampling.stop_token_ids == (3, 4)
            assert choice["token_ids"] == completion.tokens
            rows = choice["logprobs"]["content"]
            assert [row["token_id"] for row in rows] == completion.tokens
            assert [row["token"] for row in rows] == [f"token_id:{t}" for t in completion.tokens]
            assert [row["logprob"] for row in rows] == completion.logprobs
            assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [None, 0, 3])
def test_log_probs_belong_to_the_sampled_tokens_and_to_the_most_likely_ones(count, stream):
    """Each text has its bytes, unless it is a part of a character."""

    async def work():
        policy = Policy(["odd tokens"])
        async with server(policy) as (_, _, client):
            options = (
                {"stream": stream} if count is None else {"stream": stream, "top_logprobs": count}
            )
            answer = await client.chat.completions.create(**CHAT, logprobs=True, **options)
            choice = (
                [chunk async for chunk in answer][-1].choices[0] if stream else answer.choices[0]
            )
            ((ask, completion),) = policy.turns
            assert ask.sampling.top_logprobs == (count or 0)
            rows = choice.logprobs.content
            assert [row.logprob for row in rows] == completion.logprobs
            for row, token in zip(rows, completion.tokens, strict=True):
                check_text(row, token)
                assert [each.logprob for each in row.top_logprobs] == [-0.5, -1.5, -2.5][
                    : count or 0
                ]
                for more, each in enumerate(row.top_logprobs):
                    check_text(each, token + more)

    def check_text(row, token):
        assert row.token == qwen3().decode([token])
        assert row.bytes == (None if "\ufffd" in row.token else [*row.token.encode()])

    asyncio.run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_completions_have_the_most_likely_tokens_by_text(stream):
    async def work():
        policy = Policy(["plain"])
        async with server(policy) as (_, _, client):
            for count in (0, 3):
                answer = await client.completions.create(
                    model="policy", prompt="1 + 2 =", logprobs=count, stream=stream
                )
                chunks = [chunk async for chunk in answer] if stream else [answer]
                (found,) = [choice.logprobs for chunk in chunks for choice in chunk.choices]
                ask, completion = policy.turns[-1]
                assert ask.sampling.top_logprobs == count
                assert found.token_logprobs == completion.logprobs
                if not count:
                    assert found.top_logprobs is None
                    continue
                rows = zip(found.top_logprobs, completion.tokens, completion.logprobs, strict=True)
                for top, token, logprob in rows:
                    words = [qwen3().decode([token + more]) for more in range(count)]
                    expected = {words[2]: -2.5, words[1]: -1.5, words[0]: logprob}
                    assert top == expected

    asyncio.run(work())
