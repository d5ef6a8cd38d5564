"""Conversations of agents: what is captured is what the engine was fed and drew."""

import asyncio

import pytest

from tests.gateway.agents import KINDS, Policy, act, server
from tests.tiny_tokenizers import qwen3

TURNS = 6
SEQUENCES = {"none": 1, "drops thoughts": 1, "respells arguments": 1, "compacts": 2, "renames": 6}


def played(kind, *, seed=0, habits=("plain", "odd tokens", "spacing", "several calls"), **options):
    """Return the capture of a session, and the turns of its policy."""
    policy = Policy(habits=habits, seed=seed)

    async def play():
        async with server(policy) as (gateway, url, client):
            name = gateway.open_session()
            own = client.with_options(base_url=f"{url}/sessions/{name}/v1")
            await act(own, kind, TURNS, **options)
            return gateway.capture(name)

    return asyncio.run(play()), policy.turns


def check(capture, turns):
    """Check that each answer is sampled in one sequence, after the tokens it was sampled after."""
    found = []
    for sequence in capture.log.sequences:
        begin = 0
        while begin < len(sequence.tokens):
            if not sequence.sampled[begin]:
                begin += 1
                continue
            version = sequence.versions[begin]
            ask, completion = turns[version]
            end = begin + len(completion.tokens)
            assert sequence.tokens[:begin] == ask.tokens
            assert sequence.tokens[begin:end] == completion.tokens
            assert sequence.logprobs[begin:end] == completion.logprobs
            assert sequence.versions[begin:end] == completion.versions
            assert all(sequence.sampled[begin:end])
            found.append(version)
            begin = end
    assert sorted(found) == [*range(len(turns))]


@pytest.mark.parametrize("kind", KINDS)
def test_each_answer_is_captured_once_in_the_tokens_that_the_engine_saw(kind):
    capture, turns = played(kind)
    check(capture, turns)
    count = len(capture.log.sequences)
    assert capture.turns == TURNS
    assert count == capture.rewritten + 1
    assert count == SEQUENCES[kind] if kind in SEQUENCES else count > 1
    firsts = [qwen3().decode(sequence.tokens)[:10] for sequence in capture.log.sequences]
    assert set(firsts) == {"<|im_start|"[:10]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_streamed_conversation_is_the_same(stream):
    async def streamed():
        policy = Policy()
        async with server(policy) as (gateway, url, client):
            name = gateway.open_session()
            own = client.with_options(base_url=f"{url}/sessions/{name}/v1")
            messages = [{"role": "user", "content": "1 + 2?"}]
            for _ in range(4):
                messages.append(await said(own, messages, stream))
                messages.append({"role": "user", "content": "And now?"})
            return gateway.capture(name), policy.turns

    capture, turns = asyncio.run(streamed())
    check(capture, turns)
    assert len(capture.log.sequences) == 1


async def said(client, messages, stream):
    """Return the answer as a message, put together from its stream."""
    create = client.chat.completions.create
    if not stream:
        answer = await create(model="policy", messages=messages)
        return answer.choices[0].message.model_dump(exclude_none=True)
    message = {"role": "assistant", "content": "", "tool_calls": []}
    used = None
    options = {"include_usage": True}
    async for chunk in await create(
        model="policy", messages=messages, stream=True, stream_options=options
    ):
        used = chunk.usage or used
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.index == len(message["tool_calls"])
                message["tool_calls"].append(call.model_dump(exclude={"index"}))
    assert used.completion_tokens > 0
    return {**message, "tool_calls": message["tool_calls"] or None}


def test_choices_of_one_prompt_share_its_tokens():
    async def chosen():
        policy = Policy(habits=["plain"])
        async with server(policy) as (gateway, url, client):
            name = gateway.open_session()
            own = client.with_options(base_url=f"{url}/sessions/{name}/v1")
            messages = [{"role": "user", "content": "1 + 2?"}]
            answer = await own.chat.completions.create(model="policy", messages=messages, n=3)
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            for choice in answer.choices:
                history = [*messages, choice.message.model_dump(exclude_none=True)]
                history.append({"role": "user", "content": "Go on."})
                await own.chat.completions.create(model="policy", messages=history)
            return gateway.capture(name), policy.turns

    capture, turns = asyncio.run(chosen())
    check(capture, turns)
    assert len(capture.log.sequences) == 3
    assert capture.rewritten == 0
    assert [
        sum(a != b for a, b in zip(s.sampled, s.sampled[1:], strict=False))
        for s in capture.log.sequences
    ] == [3] * 3


def test_texts_and_tokens_are_continued_too():
    async def completed():
        policy = Policy(habits=["no call"])
        async with server(policy) as (gateway, url, client):
            name = gateway.open_session()
            own = client.with_options(base_url=f"{url}/sessions/{name}/v1")
            text = "1 + 2 ="
            for _ in range(3):
                answer = await own.completions.create(model="policy", prompt=text, max_tokens=5)
                text += answer.choices[0].text + " so"
            tokens = [*turns[-1].tokens] if (turns := gateway.capture(name).log.sequences) else []
            await own.completions.create(model="policy", prompt=[*tokens, 7])
            return gateway.capture(name), policy.turns

    capture, turns = asyncio.run(completed())
    check(capture, turns)
    assert len(capture.log.sequences) == 1
