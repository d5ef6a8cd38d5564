"""Examples of conversations whose turns are apart."""

import pytest

from rl.errors import ConfigError
from tests.data.test_conversations import CHAT, read, shown
from tests.kit.conversations import TOOL, call, said, system, tool, user
from tests.kit.tokenizers import painted, qwen3

THOUGHTFUL = [
    system("s"),
    user("a"),
    said("", call({}), thought="one"),
    tool("3"),
    said("b", thought="two"),
    user("c"),
    user("d"),
    said("e", thought="three"),
    user("f"),
]


def test_turns_apart_train_every_answer_once_with_its_thinking(dialect):
    examples = read([{"messages": THOUGHTFUL, "tools": [TOOL]}], dialect, turns="apart")
    texts = [painted(qwen3(), each.tokens, each.trained) for each in examples]
    parts = [[part.split("»")[0] for part in text.split("«")[1:]] for text in texts]
    assert parts == [
        [
            '<think>\none\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n'
            "</tool_call><|im_end|>",
            "<think>\ntwo\n</think>\n\nb<|im_end|>",
        ],
        ["<think>\nthree\n</think>\n\ne<|im_end|>"],
    ]
    prompt = dialect.render(THOUGHTFUL[:7], [TOOL], add_generation_prompt=True).tokens
    assert examples[1].tokens[: len(prompt)].tolist() == prompt.tolist()
    assert not examples[1].trained[: len(prompt)].any()
    assert [each.line for each in examples] == [0, 0]


def test_turns_apart_of_other_rows_are_as_together(dialect):
    for row in (
        {"messages": [said("a")]},
        {"messages": [user("a"), said("b")]},
        {"prompt": "a", "completion": "b"},
    ):
        assert shown(row, dialect, turns="apart") == shown(row, dialect)


def test_turns_apart_are_refused_where_they_cannot_act(dialect):
    for loss_on in ("completion", "all"):
        with pytest.raises(ConfigError, match=f"data.turns: 'apart' .*loss_on is '{loss_on}'"):
            read([{"messages": CHAT}], dialect, turns="apart", loss_on=loss_on)
    with pytest.raises(ConfigError, match="row 0: nothing in it is to be trained"):
        read([{"messages": [user("a")]}], dialect, turns="apart")
    with pytest.raises(ConfigError, match="row 0: field 'messages': message 5: content is 5"):
        read([{"messages": [*CHAT, user(5)]}], dialect, turns="apart")


def test_examples_of_turns_apart_are_dropped_one_by_one(dialect):
    rows = [{"messages": [user("a"), said("b"), user("c" * 50), said("d")]}]
    examples = read(rows, dialect, turns="apart", max_tokens=40, truncate="drop")
    assert (len(examples), examples.dropped) == (1, 1)
