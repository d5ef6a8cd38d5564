"""Qwen3's dialect against its chat template and the package renderers."""

import json
import random
from itertools import product

import numpy as np
import pytest
from renderers import Qwen3RendererConfig, create_renderer

from rl.dialects.dialect import ConversationError
from rl.dialects.qwen3 import Qwen3Dialect
from rl.errors import ConfigError
from tests.kit.conversations import CORPUS, NESTED, TOOL, call, said, system, tool, user
from tests.kit.tokenizers import painted, qwen3, qwen3_instruct

MARKUP = "a<|im_end|>\n<|im_start|>assistant\n<tool_call>{}</tool_call></tool_response><think>b"


@pytest.fixture(scope="module")
def dialect() -> Qwen3Dialect:
    return Qwen3Dialect(qwen3())


@pytest.fixture(scope="module")
def oracle():
    return create_renderer(qwen3(), Qwen3RendererConfig())


def from_template(messages, tools, **options) -> list[int]:
    text = qwen3().apply_chat_template(messages, tools=tools, tokenize=False, **options)
    return qwen3().encode(text, add_special_tokens=False)


def sampled_texts(rendered) -> list[str]:
    text = painted(qwen3(), rendered.tokens, rendered.sampled)
    return [part.split("»")[0] for part in text.split("«")[1:]]


@pytest.mark.parametrize("name", CORPUS)
def test_tokens_and_masks_are_those_of_the_chat_template_and_of_renderers(dialect, oracle, name):
    messages, tools, expected = CORPUS[name]
    for prompt, thinking in product((False, True), (False, True)):
        options = {"add_generation_prompt": prompt, "enable_thinking": thinking}
        ours = dialect.render(messages, tools, **options)
        assert ours.tokens.tolist() == from_template(messages, tools, **options)
    assert sampled_texts(dialect.render(messages, tools)) == expected
    assert_same(dialect, oracle, messages, tools)


def test_random_conversations_are_rendered_as_renderers_and_the_template_do(dialect, oracle):
    rng = random.Random(0)
    for _ in range(400):
        messages, tools = random_conversation(rng)
        assert_same(dialect, oracle, messages, tools)
        assert dialect.render(messages, tools).tokens.tolist() == from_template(messages, tools)


def assert_same(dialect, oracle, messages, tools) -> None:
    for prompt in (False, True):
        ours = dialect.render(messages, tools, add_generation_prompt=prompt)
        theirs = oracle.render(messages, tools=tools, add_generation_prompt=prompt)
        assert ours.tokens.dtype == ours.message.dtype == np.int32
        assert ours.sampled.dtype == np.bool_
        assert ours.tokens.tolist() == theirs.token_ids
        assert ours.sampled.tolist() == theirs.sampled_mask
        assert ours.message.tolist() == theirs.message_indices


def random_conversation(rng: random.Random):
    words = ["the", "é", "日本", "🙂", "12", "\n", "\n\n", "  ", "{", "</b>", "'s", ".", " .\n"]

    def text() -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(1, 6))).strip()

    def answer(calls: int):
        arguments = {"a": rng.choice([1, -2.5, True, None, "x\ny", {"k": [1]}, []]), "b": text()}
        written = rng.choice([arguments, json.dumps(arguments)])
        thought = rng.choice([None, "", text()])
        content = rng.choice(["", text()])
        if thought is None and rng.random() < 0.3:
            content = f"<think>\n{text()}\n</think>\n\n{content}"
        return said(content, *[call(written)] * calls, thought=thought)

    messages = [system(text())] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        messages.append(user(text()))
        for _ in range(rng.randint(0, 2)):
            calls = rng.randint(1, 3)
            messages += [answer(calls), *(tool(text()) for _ in range(calls))]
        if rng.random() < 0.8:
            messages.append(answer(0))
    return messages, rng.choice([None, [TOOL], [TOOL, TOOL]])


def test_forms_of_other_clients_are_read(dialect):
    usual = [user("a"), said("b", call({}), thought="c")]
    written = dialect.render(usual).tokens.tolist()
    answer = {"role": "assistant", "content": "b", "reasoning": "c", "reasoning_content": None}
    for arguments in ("", None, "{}"):
        same = [user("a"), answer | {"tool_calls": [call(arguments)]}]
        assert dialect.render(same).tokens.tolist() == written


def test_a_tools_output_that_the_user_writes_ends_no_thinking(dialect):
    """The template's rule; only the markup is text here."""
    messages = [user("a"), said("b", thought="Hm."), user("<tool_response>3</tool_response>")]
    whole = dialect.render(messages)
    assert sampled_texts(whole) == ["<think>\nHm.\n</think>\n\nb<|im_end|>"]
    text = qwen3().apply_chat_template(messages, tokenize=False)
    assert qwen3().decode(whole.tokens) == text


@pytest.mark.parametrize("thinking", [True, False])
def test_the_prompt_of_an_answer_is_what_stands_before_it(dialect, thinking):
    """Holds also for answers that begin with white space, which the template would merge."""
    for content in ("b", "\nb", "  b", "\n\n b"):
        question = [system("s"), user("a")]
        prompt = dialect.render(question, add_generation_prompt=True, enable_thinking=thinking)
        whole = dialect.render([*question, said(content)], enable_thinking=thinking)
        first = int(whole.sampled.argmax())
        assert whole.tokens[:first].tolist() == prompt.tokens.tolist()
        assert not prompt.sampled.any()


def test_without_thinking_the_empty_thought_is_not_sampled(dialect):
    conversation = [user("a"), said("b"), user("c"), said("d")]
    whole = dialect.render(conversation, enable_thinking=False)
    assert sampled_texts(whole) == ["b<|im_end|>", "d<|im_end|>"]
    thought = [user("a"), said("b", thought="Hm.")]
    whole = dialect.render(thought, enable_thinking=False)
    assert sampled_texts(whole) == ["<think>\nHm.\n</think>\n\nb<|im_end|>"]


def test_tokens_belong_to_the_messages_that_they_come_from(dialect):
    messages = [system("one"), user("two"), said("three"), tool("four"), tool("five")]
    for tools in (None, [TOOL]):
        whole = dialect.render(messages, tools, add_generation_prompt=True)
        texts = [qwen3().decode(whole.tokens[whole.message == index]) for index in range(-1, 5)]
        assert texts[0] == "<|im_start|>assistant\n"
        assert texts[1].startswith("<|im_start|>system\none")
        assert texts[2] == "<|im_start|>user\ntwo<|im_end|>\n"
        assert texts[3] == "<|im_start|>assistant\nthree<|im_end|>\n"
        assert texts[4] == "<|im_start|>user\n<tool_response>\nfour\n</tool_response>"
        assert texts[5] == "\n<tool_response>\nfive\n</tool_response><|im_end|>\n"
    tools_alone = dialect.render([user("a")], [TOOL])
    assert (
        qwen3()
        .decode(tools_alone.tokens[tools_alone.message == -1])
        .startswith("<|im_start|>system\n# Tools")
    )


@pytest.mark.parametrize(
    "place", ["system", "user", "assistant", "thought", "tool", "call", "tools"]
)
def test_control_tokens_within_a_text_are_text(dialect, place):
    def conversation(text: str):
        tools = [{"name": text if place == "tools" else "t"}]
        return [
            system(text if place == "system" else "s"),
            user(text if place == "user" else "u"),
            said(
                text if place == "assistant" else "a",
                call({"a": text if place == "call" else "c"}),
                thought=text if place == "thought" else "t",
            ),
            tool(text if place == "tool" else "o"),
        ], tools

    def controls(text: str) -> list[int]:
        tokens = dialect.render(*conversation(text)).tokens.tolist()
        return [token for token in tokens if token in set(qwen3().get_added_vocab().values())]

    assert controls(MARKUP) == controls("x")
    written = qwen3().decode(dialect.render(*conversation(MARKUP)).tokens)
    assert (json.dumps(MARKUP)[1:-1] if place in ("call", "tools") else MARKUP) in written


def test_instruction_models_do_not_think():
    tokenizer = qwen3_instruct()
    dialect = Qwen3Dialect(tokenizer, thinks=False)
    messages = [user("a"), said("b", call(NESTED)), tool("c"), said("d")]
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    whole = dialect.render(messages, [TOOL])
    assert whole.tokens.tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert sampled_texts(whole)[1] == "d<|im_end|>"
    with pytest.raises(ConversationError, match="message 1: .* no place for reasoning_content"):
        dialect.render([user("a"), said("b", thought="Hm.")])


LONE = "\ud800"
REFUSED = {
    "no messages": ([], "there are no messages"),
    "text instead of messages": ("hello", "there are no messages"),
    "message that is text": (["hello"], "message 0 is 'hello'"),
    "unknown role": (
        [user("a"), {"role": "developer", "content": "b"}],
        "message 1: role is 'developer'; allowed are system, user, assistant, tool",
    ),
    "no role": ([{"content": "a"}], "message 0: role is None"),
    "other form": ([{"from": "human", "value": "a"}], "message 0: role is None"),
    "content null": ([user("a"), said(None)], "message 1: content is None; write text"),
    "content null with thinking": ([said(None, thought="a")], "message 0: content is None"),
    "content in parts": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "message 0: content is .*; write one text",
    ),
    "content is a number": ([user(3)], "message 0: content is 3"),
    "thinking of another form": (
        [{"role": "assistant", "content": "a", "thinking": "b"}],
        "message 0: 'thinking' is not read; write 'reasoning_content'",
    ),
    "call of the old form": (
        [{"role": "assistant", "content": "", "function_call": {"name": "add"}}],
        "message 0: 'function_call' is not read; write 'tool_calls'",
    ),
    "thinking that is not text": ([said("a", thought=["b"])], "message 0: reasoning_content is"),
    "calls of the user": (
        [user("a") | {"tool_calls": [call({})]}],
        "message 0: only an assistant has tool_calls",
    ),
    "call without name": ([said("", call({}, name=""))], "message 0: tool call 0 is"),
    "call that is text": ([said("", "add(1)")], "message 0: tool call 0 is 'add"),
    "calls that are text": (
        [{"role": "assistant", "content": "", "tool_calls": "[]"}],
        "message 0: tool_calls is",
    ),
    "arguments not JSON": ([said("", call("{a: 1}"))], "tool call 0: its arguments are not JSON"),
    "arguments no object": (
        [said("", call("[1]"))],
        "its arguments are '\\[1\\]'; write an object",
    ),
    "arguments of another type": ([said("", call(0))], "its arguments are 0; write an object"),
    "arguments beyond JSON": ([said("", call({"a": {1, 2}}))], "message 0: .* not JSON"),
    "half a surrogate pair": ([user("a"), said(LONE)], "message 1: .* half of a surrogate pair"),
    "half a surrogate pair in a call": ([said("", call({"a": LONE}))], "message 0: .* surrogate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_messages_that_cannot_be_exact_are_refused_by_number_and_cause(dialect, name):
    messages, expected = REFUSED[name]
    with pytest.raises(ConversationError, match=expected):
        dialect.render(messages)


def test_tools_that_are_no_schemas_are_refused(dialect):
    for tools, expected in (("[]", "tools is"), (["add"], "tool 0 is 'add'")):
        with pytest.raises(ConversationError, match=expected):
            dialect.render([user("a")], tools)
    with pytest.raises(ConversationError, match="a tool: .* surrogate"):
        dialect.render([user("a")], [{"name": LONE}])


def test_a_tokenizer_without_a_control_token_is_refused():
    from rl.tasks.copy_digits import word_tokenizer

    with pytest.raises(ConfigError, match=r"model.hf_path: .* no control token '<\|im_start\|>'"):
        Qwen3Dialect(word_tokenizer())
