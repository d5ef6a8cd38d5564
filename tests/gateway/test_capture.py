"""Conversations of agents: what is captured is what the engine was fed and drew."""

from itertools import pairwise

import pytest

from rl.dialects.dialect import ConversationError
from rl.dialects.template_dialect import TemplateDialect
from rl.gateway.capture import Capture
from rl.types import Completion
from tests.kit.agents import KINDS, Policy, act, session
from tests.kit.tokenizers import copy_of, plain_family, qwen3

TURNS = 6
HABITS = ("plain", "odd tokens", "spacing", "several calls")
SEQUENCES = {"none": 1, "drops thoughts": 1, "respells arguments": 1, "compacts": 2, "renames": 6}
ASKED = {"role": "user", "content": "1 + 2?"}


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
async def test_each_answer_is_captured_once_in_the_tokens_that_the_engine_saw(kind):
    policy = Policy(HABITS)
    async with session(policy) as (client, capture):
        await act(client, kind, TURNS)
    check(capture, policy.turns)
    count = len(capture.log.sequences)
    assert capture.turns == TURNS
    assert count == capture.rewritten + 1
    assert count == SEQUENCES[kind] if kind in SEQUENCES else count > 1
    for sequence in capture.log.sequences:
        assert qwen3().decode(sequence.tokens).startswith("<|im_start|")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_streamed_conversation_is_the_same(stream):
    policy = Policy()
    async with session(policy) as (client, capture):
        messages = [ASKED]
        for _ in range(4):
            messages.append(await said(client, messages, stream))
            messages.append({"role": "user", "content": "And now?"})
    check(capture, policy.turns)
    assert len(capture.log.sequences) == 1


async def said(client, messages, stream):
    """Return the answer as a message, put together from its stream."""
    asked = {"model": "policy", "messages": messages}
    if not stream:
        answer = await client.chat.completions.create(**asked)
        return answer.choices[0].message.model_dump(exclude_none=True)
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    message = {"role": "assistant", "content": "", "tool_calls": []}
    used = None
    async for chunk in await client.chat.completions.create(**asked):
        used = chunk.usage or used
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.index == len(message["tool_calls"])
                message["tool_calls"].append(call.model_dump(exclude={"index"}))
    assert used.completion_tokens > 0
    return {**message, "tool_calls": message["tool_calls"] or None}


async def test_choices_of_one_prompt_share_its_tokens():
    policy = Policy(["plain"])
    async with session(policy) as (client, capture):
        create = client.chat.completions.create
        answer = await create(model="policy", messages=[ASKED], n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        for choice in answer.choices:
            history = [ASKED, choice.message.model_dump(exclude_none=True)]
            history.append({"role": "user", "content": "Go on."})
            await create(model="policy", messages=history)
    check(capture, policy.turns)
    assert len(capture.log.sequences) == 3
    assert capture.rewritten == 0
    for sequence in capture.log.sequences:
        marks = sequence.sampled
        assert sum(a != b for a, b in pairwise(marks)) == 3


async def test_texts_and_tokens_are_continued_too():
    policy = Policy(["no call"])
    async with session(policy) as (client, capture):
        text = "1 + 2 ="
        for _ in range(3):
            answer = await client.completions.create(model="policy", prompt=text, max_tokens=5)
            text += answer.choices[0].text + " so"
        tokens = [*capture.log.sequences[-1].tokens, 7]
        await client.completions.create(model="policy", prompt=tokens)
    check(capture, policy.turns)
    assert len(capture.log.sequences) == 1


def test_a_chat_template_gets_the_variables_that_it_reads():
    """A conversation is continued with the variables that it began with."""
    tokenizer = copy_of(plain_family("qwen2_5"))
    said = "{%- if reasoning_effort is defined %}{{ 'Effort: ' ~ reasoning_effort }}{%- endif %}"
    tokenizer.chat_template = said + tokenizer.chat_template
    dialect = TemplateDialect(tokenizer)
    capture = Capture(dialect)
    plain = capture.open([ASKED])
    low = {"reasoning_effort": "low"}
    opened = capture.open([ASKED], variables=low)
    assert tokenizer.decode(opened.tokens) == "Effort: low" + tokenizer.decode(plain.tokens)
    answer = Completion.written([*tokenizer.encode("Three."), dialect.stop_token_ids[0]])
    messages = [ASKED, capture.answer(opened, answer), {"role": "user", "content": "Sure?"}]
    more = capture.open(messages, variables=low)
    begin = [*opened.tokens, *answer.tokens]
    assert more.tokens[: len(begin)] == begin and capture.rewritten == 0
    high = capture.open(messages, variables={"reasoning_effort": "high"})
    assert tokenizer.decode(high.tokens).startswith("Effort: high") and capture.rewritten == 1
    with pytest.raises(ConversationError, match="does not read verbosity"):
        capture.open([ASKED], variables={"verbosity": "low"})
