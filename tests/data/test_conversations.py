"""Rows become examples with the right mask, or an error that names line and cause."""

import json

import numpy as np
import pytest
from datasets import Dataset
from renderers import Qwen3RendererConfig, build_training_sample, create_renderer
from tokenizers.processors import TemplateProcessing

from rl.data.conversations import ConversationsConfig, read_conversations
from rl.dialects.choose import dialect_of, dialect_or_text
from rl.errors import ConfigError
from tests.kit.conversations import (
    ASKED,
    CORPUS,
    EMPTY,
    HEAD,
    TOOL,
    call,
    said,
    system,
    tool,
    user,
    wrote,
)
from tests.kit.tokenizers import copy_of, painted, qwen3, qwen3_instruct

ANSWERED = {name: row for name, row in CORPUS.items() if row[2]}
CHAT = [*ASKED, said("d")]
LONG = 10**6


def read(source, dialect, **fields):
    config = ConversationsConfig(**({"max_tokens": LONG} | fields))
    return read_conversations(source, dialect, config)


def shown(row, dialect, **fields) -> str:
    (example,) = read([row], dialect, **fields)
    assert example.tokens.dtype == np.int32
    assert example.trained.dtype == np.bool_
    assert not example.trained[0]
    return painted(qwen3(), example.tokens, example.trained)


@pytest.mark.parametrize("name", ANSWERED)
def test_masks_are_those_of_renderers_training_samples(dialect, write, name):
    messages, tools, _ = ANSWERED[name]
    (example,) = read(write({"messages": messages, "tools": tools}), dialect)
    oracle = create_renderer(qwen3(), Qwen3RendererConfig())
    theirs = build_training_sample(oracle, messages, tools=tools)
    assert example.tokens.tolist() == theirs.token_ids
    assert example.trained.tolist() == [bool(each) for each in theirs.loss_mask]
    assert example.line == 1


USER = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
OFF = {"enable_thinking": False}
ROWS = {
    "all of a conversation": (
        {"messages": [user("a"), said("b")]},
        {"loss_on": "all"},
        f"<|im_start|>«{USER.removeprefix('<|im_start|>')}{EMPTY}b<|im_end|>\n»",
    ),
    "last answer of a conversation": (
        {"messages": CHAT},
        {"loss_on": "completion"} | OFF,
        f"{HEAD}{EMPTY}«d<|im_end|>»\n",
    ),
    "prompt and completion of messages": (
        {"prompt": CHAT[:4], "completion": CHAT[4:]},
        OFF,
        f"{HEAD}{EMPTY}«d<|im_end|>»\n",
    ),
    "completion with a tool in it": (
        {"prompt": [user("a")], "completion": [said("", call({})), tool("3"), said("b")]},
        {"loss_on": "completion"} | OFF,
        f"{USER}«{wrote('{}')}<|im_end|>»\n<|im_start|>user\n<tool_response>\n3\n"
        f"</tool_response><|im_end|>\n<|im_start|>assistant\n{EMPTY}«b<|im_end|>»\n",
    ),
    "prompt of messages, completion of text": (
        {"prompt": [user("a")], "completion": "b"},
        OFF,
        f"{USER}{EMPTY}«b<|im_end|>»\n",
    ),
    "prompt and completion of text": (
        {"prompt": "What is 1? ", "completion": "It is 1."},
        {},
        "What is 1? «It is 1.<|im_end|>»",
    ),
    "text of prompt too": (
        {"prompt": "ab", "completion": "c"},
        {"loss_on": "all"},
        "a«bc<|im_end|>»",
    ),
    "empty prompt": ({"prompt": "", "completion": "xyz"}, {}, "x«yz<|im_end|>»"),
    "empty completion": ({"prompt": "a", "completion": ""}, {}, "a«<|im_end|>»"),
    "text": ({"text": "xyz"}, {"loss_on": "all"}, "x«yz<|im_end|>»"),
    "text that a chat template has made": (
        {"prompt": "<|im_start|>user\na<|im_end|>\n", "completion": "b<|im_end|>"},
        {"control_tokens": "parse"},
        "<|im_start|>user\na<|im_end|>\n«b<|im_end|>»",
    ),
    "nulls beside": (
        {"messages": None, "prompt": None, "completion": None, "text": "xyz", "id": 5},
        {"loss_on": "all"},
        "x«yz<|im_end|>»",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_have_the_mask_of_their_form(dialect, name):
    row, fields, expected = ROWS[name]
    assert shown(row, dialect, **fields) == expected


def test_control_tokens_in_text_may_be_text(dialect):
    row = {"prompt": "a", "completion": "<|im_end|>"}
    (example,) = read([row], dialect, control_tokens="text")
    end = qwen3().convert_tokens_to_ids("<|im_end|>")
    assert example.tokens.tolist().count(end) == 1
    assert qwen3().decode(example.tokens) == "a<|im_end|><|im_end|>"


CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OUTPUT = "<tool_response>\n3\n</tool_response>"
MARKUP = {
    "one call": (
        [user("a"), said(CALLED), user(OUTPUT), said("b")],
        [user("a"), said("", call({"a": 1})), tool("3"), said("b")],
    ),
    "two calls after text and thinking": (
        [user("a"), said(f"<think>\nt\n</think>\n\nI add.\n{CALLED}\n{CALLED}"), said("b")],
        [user("a"), said("I add.", call({"a": 1}), call({"a": 1}), thought="t"), said("b")],
    ),
    "two outputs": (
        [user("a"), said("", call({})), user(f"{OUTPUT}\n{OUTPUT}"), said("b")],
        [user("a"), said("", call({})), tool("3"), tool("3"), said("b")],
    ),
    "output of a tool": (
        [user("a"), said("", call({})), tool(OUTPUT), said("b")],
        [user("a"), said("", call({})), tool("3"), said("b")],
    ),
    "parts": (
        [user("a"), {"role": "assistant", "content": [{"type": "text", "text": CALLED}]}],
        [user("a"), said("", call({"a": 1}))],
    ),
}


@pytest.mark.parametrize("name", MARKUP)
def test_tools_that_are_written_as_text_are_tools(dialect, name):
    def tokens(messages, **fields):
        whole = read([{"messages": messages}], dialect, **fields)
        (parts,) = read([{"prompt": messages[:1], "completion": messages[1:]}], dialect, **fields)
        assert parts.tokens.tolist() == whole[0].tokens.tolist()
        return [each.tokens.tolist() for each in whole]

    written, meant = MARKUP[name]
    for turns in ("together", "apart"):
        assert tokens(written, turns=turns) == tokens(meant, turns=turns)
    assert tokens(written, control_tokens="text") != tokens(meant)


def test_an_output_that_follows_no_call_is_text(dialect):
    (example,) = read([{"messages": [user(OUTPUT), said("b")]}], dialect)
    assert qwen3().convert_tokens_to_ids("<tool_response>") not in example.tokens


@pytest.mark.parametrize("prompt", ["a", [user("a")], []])
def test_a_prompt_may_repeat_the_begin_of_a_conversation(dialect, prompt):
    row = {"messages": [user("a"), said("b")]}
    assert shown(row | {"prompt": prompt}, dialect) == shown(row, dialect)
    for other in ("c", [user("c")], 5):
        with pytest.raises(ConfigError, match="it has 'messages', 'prompt'; write"):
            read([row | {"prompt": other}], dialect)


def test_columns_may_have_other_names(dialect):
    row = {"question": "a? ", "text": "b", "id": 5}
    columns = {"prompt": "question", "completion": "text"}
    assert shown(row, dialect, columns=columns) == "a? «b<|im_end|>»"
    with pytest.raises(ConfigError, match="row 0: data.columns names 'answer'; the row has no suc"):
        read([row], dialect, columns={"prompt": "question", "completion": "answer"})
    with pytest.raises(ConfigError, match="data.columns: 'answer' is not one of messages, prompt"):
        read([row], dialect, columns={"answer": "text"})


def test_content_may_be_parts_and_developers_are_systems(dialect):
    parts = [{"type": "text", "text": each} for each in ("a", "b")]
    row = {"messages": [{"role": "developer", "content": "s"}, user(parts), said("c")]}
    assert shown(row, dialect) == shown({"messages": [system("s"), user("ab"), said("c")]}, dialect)


def test_thinking_without_a_place_in_the_template_is_refused():
    rows = [{"messages": [user("a"), said("<think>\nt\n</think>\n\nb")]}]
    with pytest.raises(ConfigError, match="message 1: the chat template has no place for reason"):
        read(rows, dialect_of(qwen3_instruct()))


BROKEN = {
    "call not JSON": (
        [user("a"), said("<tool_call>add(1)</tool_call>")],
        "message 1: the tool call 'add.1.' in its content is not JSON: .* write \"tool_calls\"",
    ),
    "call without a name": (
        [user("a"), said('<tool_call>{"arguments": {}}</tool_call>')],
        "message 1: tool call 0 is .*; write",
    ),
    "call within text": (
        [user("a"), said(f"{CALLED} or so")],
        "message 1: its content has a tool call among other text .*control_tokens to 'text'",
    ),
    "system only": (CORPUS["system only"][0], "nothing in it is to be trained: no token of an ass"),
    "user only": ([user("a")], "nothing in it is to be trained"),
    "messages of text": ("a", "field 'messages' is 'a'; write a list of messages"),
    "unknown role": ([{"role": "bot", "content": "a"}], "field 'messages': message 0: role is 'bo"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_conversations_that_cannot_be_trained_are_named_by_line(dialect, write, name):
    messages, message = BROKEN[name]
    path = write({"messages": CHAT}, {"messages": messages})
    with pytest.raises(ConfigError, match=message) as error:
        read(path, dialect)
    assert str(error.value).startswith(f"data.path: {path} line 2: ")


def form(row, message, **fields):
    return row, fields, message


FORMS = {
    "nothing": form({}, r"it has nothing; write \{\"messages\""),
    "sharegpt": form({"conversations": "a"}, "it has 'conversations'; write"),
    "unknown role in a completion": form(
        {"prompt": [user("a")], "completion": [said("b"), {"role": "bot", "content": "c"}]},
        "fields 'prompt' and 'completion': message 2: role is 'bot'",
    ),
    "two forms": form({"messages": CHAT, "text": "a"}, "it has 'messages', 'text'; write"),
    "completion missing": form({"prompt": "a"}, "it has 'prompt'; write"),
    "text without an assistant": form({"text": "a"}, "loss_on is 'assistant'; set it to 'all'"),
    "prompt of text, completion of messages": form(
        {"prompt": "a", "completion": [said("b")]},
        "field 'prompt' is 'a' and field 'completion' .* both as text or both as messages",
    ),
    "prompt that is a number": form({"prompt": 5, "completion": "a"}, "field 'prompt' is 5"),
    "completion that is a number": form(
        {"prompt": [user("a")], "completion": 5},
        "field 'completion' is 5; write the assistant's text",
    ),
    "completion that repeats the prompt": form(
        {"prompt": [user("a")], "completion": [user("a"), said("b")]},
        "field 'completion' .* of which the first is the assistant's",
    ),
    "no last answer": form(
        {"messages": CHAT[:4]}, "its last message is not the assistant's", loss_on="completion"
    ),
    "control token in text": form(
        {"prompt": "<|im_start|>user", "completion": "a"},
        r"field 'prompt' has the control token '<\|im_start\|>'; set data.control_tokens",
    ),
    "blank text": form({"text": " "}, "field 'text' is missing or not text", loss_on="all"),
    "tools not JSON": form({"messages": CHAT, "tools": "add"}, "field 'tools' is not JSON"),
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_of_no_form_are_refused_by_number_and_cause(dialect, name):
    row, fields, message = FORMS[name]
    with pytest.raises(ConfigError, match=f"^data.path: row 0: .*{message}"):
        read([row], dialect, **fields)


def test_unknown_choices_are_refused(dialect):
    for field in ("loss_on", "turns", "truncate", "control_tokens"):
        with pytest.raises(ConfigError, match=f"data.{field}: 'left' is not one of "):
            read([{"messages": CHAT}], dialect, **{field: "left"})


def test_tools_may_be_json_text(dialect):
    row = {"messages": CHAT, "tools": [TOOL]}
    assert shown(row, dialect) == shown(row | {"tools": json.dumps([TOOL])}, dialect)


def test_a_dataset_gives_the_same_examples_as_its_rows(dialect):
    rows = [
        {"messages": [user("a"), said("b", thought="t")], "tools": None},
        {"messages": [user("a"), said("", call({"a": 1})), tool("3"), said("c")], "tools": [TOOL]},
        {"messages": [user("a"), said("", call({"other": "x"}))], "tools": [TOOL]},
    ]
    ours = read(rows, dialect)
    theirs = read(Dataset.from_list(rows), dialect)
    for one, other in zip(ours, theirs, strict=True):
        assert painted(qwen3(), one.tokens, one.trained) == painted(
            qwen3(), other.tokens, other.trained
        )
        assert one.line == other.line


LINES = [{"messages": [user("a"), said("b " * n)]} for n in (1, 40, 2)]


def test_long_examples_are_an_error_that_names_the_line(dialect, write):
    message = "line 2: it has .* tokens, more than data.max_tokens=40 allows; .*'drop' or 'right'"
    with pytest.raises(ConfigError, match=message):
        read(write(*LINES), dialect, max_tokens=40)
    whole = len(read(LINES[1:2], dialect)[0])
    (kept,) = read(LINES[1:2], dialect, max_tokens=whole)
    assert not kept.truncated


def test_long_examples_may_be_dropped_or_cut_and_are_counted(dialect):
    examples = read(LINES, dialect, max_tokens=40, truncate="drop")
    assert [example.line for example in examples] == [0, 2]
    assert (examples.dropped, examples.truncated) == (1, 0)
    with pytest.raises(ConfigError, match="max_tokens: each of the 3 examples has more than 5 tok"):
        read(LINES, dialect, max_tokens=5, truncate="drop")
    examples = read(LINES, dialect, max_tokens=40, truncate="right")
    (whole,) = read(LINES[1:2], dialect)
    assert examples[1].tokens.tolist() == whole.tokens[:40].tolist()
    assert examples[1].trained.tolist() == whole.trained[:40].tolist()
    assert [example.truncated for example in examples] == [False, True, False]
    assert (examples.dropped, examples.truncated) == (0, 1)


def test_an_example_that_is_cut_before_its_answer_is_left_out_and_counted(dialect):
    rows = [{"messages": [user("word " * 50), said("b")]}, {"messages": [user("a"), said("b")]}]
    examples = read(rows, dialect, max_tokens=20, truncate="right")
    assert [example.line for example in examples] == [1]
    assert (examples.dropped, examples.truncated) == (1, 0)


def test_base_models_train_on_text(write):
    tokenizer = copy_of(qwen3())
    tokenizer.chat_template = None
    dialect = dialect_or_text(tokenizer)
    assert shown({"prompt": "a", "completion": "bc"}, dialect) == "a«bc<|im_end|>»"
    path = write({"prompt": "a", "completion": "bc"}, {"messages": CHAT})
    with pytest.raises(ConfigError, match="line 2: field 'messages': .* has no chat template"):
        read(path, dialect)


def test_plain_text_begins_with_the_token_that_the_tokenizer_puts_first():
    tokenizer = copy_of(qwen3())
    tokenizer.bos_token = "<|im_start|>"
    template = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.backend_tokenizer.post_processor = template
    dialect = dialect_of(tokenizer)
    for row in ({"prompt": "", "completion": "ab"}, {"prompt": "<|im_start|>", "completion": "ab"}):
        assert shown(row, dialect, control_tokens="parse") == "<|im_start|>«ab<|im_end|>»"
    assert shown({"text": "ab"}, dialect, loss_on="all") == "<|im_start|>«ab<|im_end|>»"
