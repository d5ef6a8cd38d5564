"""Answers of the gateway: calls, texts that end them, log-probs, tokens."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from openai import BadRequestError

from rl.gateway.answers import until
from rl.gateway.capture import Capture
from rl.types import Completion
from rl.types.routed_experts import RoutedExperts
from tests.gateway.test_http import CHAT, GENERATE, MESSAGES, post
from tests.kit.agents import LONGEST, Policy, collected, joined, server, session
from tests.kit.conversations import TOOL
from tests.kit.tokenizers import qwen3

STREAM = pytest.mark.parametrize("stream", [False, True])


def test_an_overflow_is_said_in_the_words_that_client_libraries_look_for():
    """litellm looks for the first words, langchain for the second, opencode for the last."""
    ((_, answer),) = post([("/v1/completions", {"prompt": "a " * LONGEST})])
    said = answer["error"]["message"]
    assert said.startswith(f"This model's maximum context length is {LONGEST} tokens. However, ")
    assert "prompt is too long" in said
    assert "Please reduce the length of the messages" in said


async def test_tool_calls_of_a_conversation_without_a_session_have_ids_of_their_own():
    async with server(Policy(["several calls"])) as (_, _, client):
        create = client.chat.completions.create
        answers = [await create(**CHAT, tools=[TOOL], n=2) for _ in range(2)]
    messages = [choice.message for answer in answers for choice in answer.choices]
    calls = [call.id for message in messages for call in message.tool_calls]
    assert len({*calls}) == len(calls) >= 8


async def call_three_times(client, **options):
    """Have the policy call a tool in three turns, once in each; return the answers."""
    messages = [*MESSAGES]
    answers = []
    for _ in range(3):
        said = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL], **options
        )
        message = said.choices[0].message
        (call,) = message.tool_calls
        messages.append(message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        answers.append(said)
    return answers


async def test_an_answer_without_parallel_calls_ends_with_its_first_call():
    policy = Policy(["several calls"])
    async with session(policy) as (client, capture):
        answers = await call_three_times(client, parallel_tool_calls=False)
    assert {each.choices[0].finish_reason for each in answers} == {"tool_calls"}
    (sequence,) = capture.log.sequences
    said = list(itertools.compress(sequence.tokens, sequence.sampled))
    assert qwen3().decode(said).count("</tool_call>") == 3
    assert qwen3().decode(sequence.tokens).count("<tool_response>") == 2
    assert len(said) < sum(len(completion.tokens) for _, completion in policy.turns)


def test_an_answer_that_is_cut_keeps_the_experts_of_what_is_left():
    ids = np.arange(5, dtype=np.uint8).reshape(-1, 1, 1)
    whole = replace(Completion.written([7, 8, 9]), experts=RoutedExperts(ids))
    assert until(lambda tokens: 8 in tokens, whole).experts == RoutedExperts(ids[:4])


@pytest.mark.parametrize("name", [None, TOOL["function"]["name"]])
@pytest.mark.parametrize("thinks", [True, False])
async def test_a_tool_call_can_be_forced_and_continued(name, thinks):
    class Caller(Policy):
        """Policy that ends the call that its prompt begins."""

        async def __call__(self, ask):
            text = qwen3().decode(ask.tokens)
            rest = (
                ' {"a": 1}}\n'
                if text.endswith('"arguments":')
                else 'add", "arguments": {"a": 1}}\n'
            )
            completion = Completion.written(qwen3().encode(rest + "</tool_call><|im_end|>"))
            self.turns.append((ask, completion))
            return completion

    choice = {"type": "function", "function": {"name": name}} if name else "required"
    more = {"chat_template_kwargs": {"enable_thinking": thinks}}
    policy = Caller()
    async with session(policy) as (client, capture):
        answers = await call_three_times(client, tool_choice=choice, extra_body=more)
    for answer in answers:
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 1}
    (sequence,) = capture.log.sequences
    sampled = [token for _, completion in policy.turns for token in completion.tokens]
    assert list(itertools.compress(sequence.tokens, sequence.sampled)) == sampled


STOPS = [("answer", "The"), (["42", "is "], "The answer"), ("never", "The answer is 42.")]


@STREAM
@pytest.mark.parametrize(("stop", "said"), STOPS)
async def test_an_answer_ends_before_a_stop_text(stop, said, stream):
    policy = Policy(["no call"])
    options = {"model": "policy", "stop": stop, "stream": stream}
    if stream:
        options["stream_options"] = {"include_usage": True}
    async with session(policy) as (client, capture):
        for chat in (True, False):
            if chat:
                answer = await client.chat.completions.create(messages=MESSAGES, **options)
            else:
                answer = await client.completions.create(prompt="1 + 2 =", **options)
            chunks = await collected(answer)
            choices = [choice for chunk in chunks for choice in chunk.choices]
            parts = [getattr(each, "delta", getattr(each, "message", each)) for each in choices]
            found = "".join((each.content if chat else each.text) or "" for each in parts)
            assert found.strip().endswith(said)
            assert choices[-1].finish_reason == "stop"
            count = chunks[-1].usage.completion_tokens
            ask, completion = policy.turns[-1]
            assert ask.sampling.stop == tuple([stop] if isinstance(stop, str) else stop)
            assert count == len(completion.tokens)
    assert sum(capture.log.sequences[-1].sampled) == count


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


@STREAM
@pytest.mark.parametrize("count", [None, 0, 3])
async def test_log_probs_belong_to_the_sampled_tokens_and_to_the_most_likely_ones(count, stream):
    """Each text has its bytes, unless it is a part of a character."""

    def check_text(row, token):
        assert row.token == qwen3().decode([token])
        assert row.bytes == (None if "\ufffd" in row.token else [*row.token.encode()])

    policy = Policy(["odd tokens"])
    options = {} if count is None else {"top_logprobs": count}
    async with server(policy) as (_, _, client):
        answer = await client.chat.completions.create(
            **CHAT, logprobs=True, stream=stream, **options
        )
        chunks = await collected(answer)
    ((ask, completion),) = policy.turns
    assert ask.sampling.top_logprobs == (count or 0)
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert not stream or len(choices) > 1
    rows = [row for choice in choices for row in choice.logprobs.content]
    assert [row.logprob for row in rows] == completion.logprobs
    for row, token in zip(rows, completion.tokens, strict=True):
        check_text(row, token)
        most_likely = [-0.5, -1.5, -2.5][: count or 0]
        assert [each.logprob for each in row.top_logprobs] == most_likely
        for more, each in enumerate(row.top_logprobs):
            check_text(each, token + more)


@STREAM
@pytest.mark.parametrize("count", [0, 3])
async def test_completions_have_the_most_likely_tokens_by_text(count, stream):
    """The most likely of the tokens with one text counts: clients look for the greedy one."""
    policy = Policy(["plain"])
    async with server(policy) as (_, _, client):
        answer = await client.completions.create(
            model="policy", prompt="1 + 2 =", logprobs=count, stream=stream
        )
        chunks = await collected(answer)
    (choice,) = joined(chunks)
    assert not stream or len(chunks) > 2
    found = choice["logprobs"]
    ((ask, completion),) = policy.turns
    assert ask.sampling.top_logprobs == count
    assert found["token_logprobs"] == completion.logprobs
    if not count:
        assert "top_logprobs" not in found
        return
    rows = zip(found["top_logprobs"], completion.tokens, completion.logprobs, strict=True)
    for top, token, logprob in rows:
        words = [qwen3().decode([token + more]) for more in range(count)]
        assert top == {words[2]: -2.5, words[1]: -1.5, words[0]: max(logprob, -0.5)}


@STREAM
@pytest.mark.parametrize("prompt", ["1 + 2 =", [40, 41, 42]])
@pytest.mark.parametrize("count", [None, 0, 2])
async def test_an_echo_begins_with_the_prompt_and_its_log_probs(prompt, count, stream):
    policy = Policy(["plain"])
    async with server(policy) as (_, _, client):
        answer = await client.completions.create(
            model="policy", prompt=prompt, echo=True, logprobs=count, stream=stream
        )
        chunks = await collected(answer)
    (choice,) = joined(chunks)
    assert not stream or len(chunks) > 2
    ((ask, completion),) = policy.turns
    assert ask.sampling.prompt_logprobs == count
    text = prompt if isinstance(prompt, str) else qwen3().decode(prompt)
    assert choice["text"].startswith(text) and len(choice["text"]) > len(text)
    if count is None:
        assert "logprobs" not in choice
        return
    found = choice["logprobs"]
    tokens = [*ask.tokens, *completion.tokens]
    assert found["tokens"] == [qwen3().decode([token]) for token in tokens]
    asked = completion.prompt_logprobs[1:]
    assert found["token_logprobs"] == [None, *asked, *completion.logprobs]
    if not count:
        assert "top_logprobs" not in found
        return
    assert found["top_logprobs"][0] is None
    rows = [*zip(found["top_logprobs"], tokens, found["token_logprobs"], strict=True)]
    for top, token, logprob in rows[1:]:
        words = [qwen3().decode([token + more]) for more in range(2)]
        assert top == {words[1]: -1.5, words[0]: max(logprob, -0.5)}


@pytest.mark.parametrize("form", ["json_object", "json_schema"])
async def test_an_answer_of_a_form_is_asked_of_the_generator_without_a_thought(form):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    own = {"type": form} | (
        {"json_schema": {"name": "a", "schema": schema, "strict": True}}
        if form == "json_schema"
        else {}
    )
    policy = Policy(["plain"])
    async with server(policy) as (_, _, client):
        await client.chat.completions.create(**CHAT, response_format=own)
        await client.chat.completions.create(**CHAT, response_format={"type": "text"})
        await client.chat.completions.create(**CHAT, reasoning_effort="none")
    formed, free, silent = (ask for ask, _ in policy.turns)
    wanted = schema if form == "json_schema" else {"type": "object"}
    assert json.loads(formed.sampling.json_schema) == wanted
    assert free.sampling.json_schema is silent.sampling.json_schema is None
    texts = [qwen3().decode(each.tokens) for each in (formed, free, silent)]
    assert [text.endswith("</think>\n\n") for text in texts] == [True, False, True]


async def test_a_prompt_that_begins_a_thought_takes_no_form(monkeypatch):
    parse = Capture.parse
    opened = lambda self, *args: replace(parse(self, *args), is_reasoning_open=True)  # noqa: E731
    monkeypatch.setattr(Capture, "parse", opened)
    async with server(Policy()) as (_, _, client):
        with pytest.raises(BadRequestError, match="begins each answer with a thought"):
            await client.chat.completions.create(**CHAT, response_format={"type": "json_object"})


async def test_the_end_of_an_answer_can_be_put_off():
    policy = Policy(["plain"])
    async with server(policy) as (gateway, _, client):
        more = [{"min_tokens": 5}, {"ignore_eos": True}, {"ignore_eos": True}]
        more[2] |= {"stop_token_ids": [7]}
        for each in more:
            await client.chat.completions.create(**CHAT, extra_body=each)
    own = [(ask.sampling.min_tokens, ask.sampling.stop_token_ids) for ask, _ in policy.turns]
    assert own == [(5, gateway.dialect.stop_token_ids), (0, ()), (0, (7,))]


async def test_samples_of_neighbouring_seeds_have_seeds_of_their_own():
    policy = Policy(["plain"])
    async with server(policy) as (_, _, client):
        for seed in (5, 6, -6):
            await client.chat.completions.create(**CHAT, n=8, seed=seed)
    seeds = [ask.seed for ask, _ in policy.turns]
    assert len({*seeds}) == len(seeds) == 24
    assert seeds[:9:8] == [5, 6]
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("echo", [False, True])
async def test_tokens_of_completions_have_their_places_in_the_text(echo):
    policy = Policy(["odd tokens"])
    async with server(policy) as (_, _, client):
        said = await client.completions.create(
            model="policy", prompt="1 + 2 =", logprobs=0, echo=echo
        )
    (choice,) = said.choices
    found = choice.logprobs
    ((ask, completion),) = policy.turns
    given = ask.tokens if echo else []
    whole = [*given, *completion.tokens]
    assert len(found.text_offset) == len(found.tokens) == len(whole)
    for place, offset in enumerate(found.text_offset):
        text = qwen3().decode(whole[:place])
        assert offset == min(len(text.rstrip("\ufffd")), len(choice.text))
        assert choice.text.startswith(text[:offset])
