"""Several files are one source; ShareGPT's rows and options of the template are read."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rl.data.conversations import ConversationsConfig, read_conversations
from rl.data.jsonl import read_rows
from rl.data.stored import Stored
from rl.dialects.choose import dialect_of
from rl.errors import ConfigError
from tests.kit.conversations import TOOL, said, system, tool, user
from tests.kit.tables import check_rows
from tests.kit.tokenizers import copy_of, qwen3

ROWS = [{"messages": [user(f"{n}?"), said("a" * n)]} for n in range(1, 9)]


def lines(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def folder(tmp_path, dataset_cache):
    """Rows 1 to 8 in five files of four forms."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jsonl").write_bytes(lines(ROWS[:2]))
    (tmp_path / "a" / "2.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[2:3])))
    with pa.CompressedOutputStream(str(tmp_path / "a" / "3.jsonl.zst"), "zstd") as file:
        file.write(lines(ROWS[3:5]))
    parquet.write_table(pa.Table.from_pylist(ROWS[5:7]), tmp_path / "b.parquet")
    (tmp_path / "c, d.jsonl").write_bytes(lines(ROWS[7:]))
    return tmp_path


def test_files_of_a_path_follow_each_other(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)

    def check(row):
        path, rows, parts = row
        found = list(read_rows(path))
        assert [each.value for each in found] == rows
        assert [each.part for each in found] == parts

    check_rows(
        [
            ("a/3.jsonl.zst", ROWS[3:5], [0, 0]),
            ("~/a/*.jsonl*", ROWS[:5], [0, 0, 1, 2, 2]),
            ("**/[12].jsonl*", ROWS[:3], [0, 0, 1]),
            ("b.parquet, ~/a/*", ROWS[5:7] + ROWS[:5], [0, 0, 1, 1, 1, 1, 1]),
            ("c, d.jsonl", ROWS[7:], [0]),
        ],
        check,
    )


def test_a_row_of_several_files_is_named_by_its_file(folder, dialect):
    (folder / "a" / "4.jsonl").write_bytes(lines([*ROWS, {"question": "a"}]))
    problem = f"^task.path: {folder}/a/4.jsonl line 9: it has 'question'"
    with pytest.raises(ConfigError, match=problem):
        read_conversations(f"{folder}/a/*", dialect, ConversationsConfig(), section="task")


def test_examples_are_stored_if_a_file_is_mapped_into_memory(folder, dialect):
    def items(path):
        return read_conversations(path, dialect, ConversationsConfig()).items

    assert isinstance(items(f"{folder}/b.parquet,{folder}/a/*"), Stored)
    assert isinstance(items(f"{folder}/a/*"), list)


def talk(*turns, **more):
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **more}


LOOK = json.dumps({"name": "look_up", "arguments": {"word": "a"}})
LOOKED = {"role": "assistant", "content": "", "tool_calls": [{"function": json.loads(LOOK)}]}
SHAREGPT = {
    "a chat": (
        talk(("system", "Be brief."), ("human", "1?"), ("gpt", "2")),
        {"messages": [system("Be brief."), user("1?"), said("2")]},
    ),
    "a column of the system": (
        talk(("human", "1?"), ("gpt", "2"), system="Be brief."),
        {"messages": [system("Be brief."), user("1?"), said("2")]},
    ),
    "a function": (
        talk(
            *(("human", "a?"), ("function_call", LOOK), ("function", "b"), ("gpt", "b")),
            tools=json.dumps([TOOL]),
        ),
        {"messages": [user("a?"), LOOKED, tool("b"), said("b")], "tools": [TOOL]},
    ),
    "a call of Hermes": (
        talk(
            ("human", "a?"),
            ("gpt", f"<tool_call>\n{LOOK}\n</tool_call>"),
            ("tool", "<tool_response>\nb\n</tool_response>"),
            ("gpt", "b"),
        ),
        {"messages": [user("a?"), LOOKED, tool("b"), said("b")]},
    ),
}


def examples(row, dialect, **fields):
    found = read_conversations([row], dialect, ConversationsConfig(**fields))
    return [(each.tokens.tolist(), each.trained.tolist()) for each in found]


@pytest.mark.parametrize("name", SHAREGPT)
def test_conversations_of_sharegpt_are_messages(dialect, name):
    theirs, ours = SHAREGPT[name]
    assert examples(theirs, dialect) == examples(ours, dialect)
    assert examples(theirs, dialect, turns="apart") == examples(ours, dialect, turns="apart")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (talk(("human", "a"), ("bing", "b")), "message 1: from is 'bing'; allowed are human, gpt"),
        (talk(("human", "a"), ("function_call", "{")), "message 1: the tool call '{' .* not JSON"),
        (talk(("human", "a"), ("gpt", None)), "message 1: content is None; write text"),
    ],
)
def test_messages_of_sharegpt_that_cannot_be_read_are_named(dialect, row, problem):
    with pytest.raises(ConfigError, match=f"row 0: field 'messages': {problem}"):
        examples(row, dialect)


def test_a_row_may_have_options_of_the_chat_template(dialect):
    row = {"messages": [user("1?"), said("2")]}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert examples(row | off, dialect) == examples(row, dialect, enable_thinking=False)
    assert examples(row | off, dialect) != examples(row, dialect)
    text = {"chat_template_kwargs": json.dumps(off["chat_template_kwargs"])}
    assert examples(row | text, dialect) == examples(row | off, dialect)
    for options, problem in (
        ({"effort": "high"}, "field 'messages': this chat format has no option effort, only"),
        ([1], r"field 'chat_template_kwargs' is \[1\]; write an object, such as"),
        ({"enable_thinking": "no"}, "field 'chat_template_kwargs' is .*; write an object"),
    ):
        with pytest.raises(ConfigError, match=f"row 0: {problem}"):
            examples(row | {"chat_template_kwargs": options}, dialect)


EFFORT = (
    "{{- '<|im_start|>effort ' + (effort or 'low') + '\n' }}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def test_options_of_a_row_are_those_of_its_template():
    tokenizer = copy_of(qwen3())
    tokenizer.chat_template = EFFORT
    dialect = dialect_of(tokenizer)
    row = {"messages": [user("1?"), said("2"), user("3?"), said("4")]}

    def texts(**options):
        (found,) = examples(row | {"chat_template_kwargs": options}, dialect)
        return tokenizer.decode(found[0])

    assert texts(effort="high").startswith("<|im_start|>effort high\n<|im_start|>user")
    low = texts()
    assert low.startswith("<|im_start|>effort low\n")
    assert texts(effort="high") == low.replace("effort low", "effort high")
