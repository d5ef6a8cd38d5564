"""Responses API: the same prompts, answers and limits as those of chats, in items."""

import itertools
import json

import pytest

from tests.gateway.test_http import MESSAGES, post
from tests.kit.agents import Policy, server, session
from tests.kit.conversations import TOOL
from tests.kit.tokenizers import qwen3

PATH = "/v1/responses"
ITEM_TOOL = {"type": "function", **TOOL["function"]}
ASK = {"model": "policy", "input": "1 + 2?"}


async def test_a_conversation_in_items_is_continued_token_for_token():
    """Thoughts, texts, calls and their outputs come back as the client got them."""
    policy = Policy(["several calls", "plain"])
    async with session(policy) as (client, capture):
        items = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}]
        kinds = set()
        for _ in range(6):
            said = await client.responses.create(
                model="policy", instructions="You add.", input=items, tools=[ITEM_TOOL]
            )
            items += [each.model_dump(exclude_none=True) for each in said.output]
            calls = [each for each in said.output if each.type == "function_call"]
            kinds |= {each.type for each in said.output}
            items += [
                {"type": "function_call_output", "call_id": each.call_id, "output": "3"}
                for each in calls
            ]
            if not calls:
                assert said.output_text
                items.append({"type": "message", "role": "user", "content": "Go on."})
    assert kinds == {"reasoning", "message", "function_call"}
    (sequence,) = capture.log.sequences
    sampled = [token for _, completion in policy.turns for token in completion.tokens]
    assert list(itertools.compress(sequence.tokens, sequence.sampled)) == sampled
    assert capture.rewritten == 0


async def test_a_response_is_the_answer_of_a_chat():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    policy = Policy(["plain"])
    async with server(policy) as (_, _, client):
        said = await client.responses.create(
            **ASK,
            instructions="You add.",
            max_output_tokens=7,
            temperature=0.5,
            top_p=0.9,
            text={"format": form},
            store=False,
            extra_body={"seed": 3, "min_p": 0.1},
        )
        chat = await client.chat.completions.create(
            model="policy",
            messages=[{"role": "system", "content": "You add."}, *MESSAGES],
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.9,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            extra_body={"seed": 3, "min_p": 0.1},
        )
    (first, completion), (second, _) = policy.turns
    assert first == second
    assert json.loads(first.sampling.json_schema) == schema
    assert said.id.startswith("resp-") and said.object == "response"
    assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert said.usage.output_tokens == len(completion.tokens) == 7
    assert said.usage.input_tokens == chat.usage.prompt_tokens == len(first.tokens)


async def test_a_call_and_silence_can_be_asked_for():
    policy = Policy(["plain"])
    async with server(policy) as (_, _, client):
        choice = {"type": "function", "name": TOOL["function"]["name"]}
        for more in (
            {"tools": [ITEM_TOOL], "tool_choice": choice},
            {"reasoning": {"effort": "none"}},
        ):
            said = await client.responses.create(**ASK, **more)
            assert said.status == "completed"
    called, silent = (qwen3().decode(ask.tokens) for ask, _ in policy.turns)
    assert called.endswith('"arguments":')
    assert silent.endswith("</think>\n\n")


CASES = [
    ({"input": []}, "invalid_value", "input"),
    ({"input": [{"role": "user"}]}, "invalid_value", "input.0 is "),
    ({"input": [{"type": "image", "role": "user", "content": "a"}]}, "invalid_value", "input.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "invalid_value", "text"),
    ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools.0 is "),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "invalid_value", "give a schema"),
    ({"text": {"verbosity": "low"}}, "invalid_value", "does not read verbosity"),
    ({"text": {"wat": 1}}, "unsupported_parameter", "wat"),
    ({"reasoning": {"effort": "huge"}}, "invalid_value", "reasoning_effort is 'huge'"),
    ({"previous_response_id": "resp-1"}, "unsupported_parameter", "previous_response_id"),
    ({"background": True}, "unsupported_parameter", "background"),
    ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens is 0"),
]


def test_requests_that_cannot_be_served_get_typed_errors():
    policy = Policy()
    answers = post([(PATH, ASK | body) for body, *_ in CASES], policy=policy)
    for (body, code, words), (status, answer) in zip(CASES, answers, strict=True):
        error = answer.get("error", {})
        assert (status, error.get("code")) == (400, code), (body, answer)
        assert words in error["message"], (body, error)
    assert policy.turns == []


@pytest.mark.parametrize("form", [{"type": "text"}, None])
async def test_a_free_text_needs_no_form(form):
    policy = Policy(["plain"])
    async with server(policy) as (_, _, client):
        said = await client.responses.create(**ASK, text={"format": form})
    assert said.output_text
    assert policy.turns[0][0].sampling.json_schema is None
