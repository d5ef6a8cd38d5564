"""Rows of files, of folders and of the Hub are the same rows, and memory does not hold them."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset, DatasetDict

from rl.data.conversations import ConversationsConfig, read_conversations
from rl.data.jsonl import read_rows
from rl.data.preferences import read_preferences
from rl.data.sources import SourceConfig, is_hub_name, newest_commit
from rl.data.stored import Stored, parted
from rl.errors import ConfigError
from tests.kit.hub import TOKEN, using_hub
from tests.kit.tables import check_rows

ROWS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "é" * n}]}
    for n in range(1, 20)
]
NAME = "tiller/sums"


def parquet_of(rows) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def lines_of(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(scope="module", autouse=True)
def hub(tmp_path_factory):
    """A Hub. The cache of all tests of this file is that of the Hub's files."""
    with using_hub(tmp_path_factory.mktemp("hf")) as hub:
        yield hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The rows in all formats, and files that cannot be read."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "rows.jsonl").write_bytes(lines_of(ROWS))
    (folder / "rows.json").write_text(json.dumps(ROWS, indent=2))
    (folder / "rows.parquet").write_bytes(parquet_of(ROWS))
    table = Dataset.from_list(ROWS)
    table.save_to_disk(folder / "saved")
    DatasetDict(train=table, test=table.select([0])).save_to_disk(folder / "splits")
    (folder / "rows.arrow").hardlink_to(folder / "saved" / "data-00000-of-00001.arrow")
    (folder / "parts").mkdir()
    (folder / "parts" / "train-0.parquet").write_bytes(parquet_of(ROWS[:9]))
    (folder / "parts" / "train-1.parquet").write_bytes(parquet_of(ROWS[9:]))
    (folder / "parts" / "test-0.parquet").write_bytes(parquet_of(ROWS[:1]))
    (folder / "cut.parquet").write_bytes(parquet_of(ROWS)[:200])
    (folder / "nothing").mkdir()
    return folder


def source(path: str = NAME, **options) -> SourceConfig:
    return SourceConfig(
        **{"path": path, "dataset_config": "main" if path == NAME else ""} | options
    )


def read(source):
    return [row.value for row in read_rows(source, field="task.path")]


FORMATS = ("jsonl", "json", "parquet", "arrow")


def test_every_format_gives_the_same_examples_in_the_same_order(folder, dialect):
    def examples(name):
        found = read_conversations(str(folder / name), dialect, ConversationsConfig())
        is_mapped = name not in ("rows.jsonl", "rows.json")
        assert isinstance(found.items, Stored if is_mapped else list), name
        return [(each.tokens.tolist(), each.trained.tolist()) for each in found]

    wanted = examples("rows.jsonl")
    assert len(wanted) == len(ROWS)
    names = [*(f"rows.{ending}" for ending in FORMATS), "saved", "splits", "parts"]

    def check(name):
        assert examples(name) == wanted

    check_rows(names, check)
    assert read(str(folder / "parts")) == ROWS


def test_splits_and_their_parts_are_read(folder):
    for name, split, count in (
        ("splits", "test", 1),
        ("parts", "test", 1),
        ("parts", "train[:3]", 3),
        ("parts", "train+test", len(ROWS) + 1),
        ("rows.parquet", "train", len(ROWS)),
    ):
        assert len(read(SourceConfig(path=str(folder / name), split=split))) == count, (name, split)


def test_a_row_of_a_table_is_named_by_its_number(folder, dialect):
    path = folder / "pairs.parquet"
    path.write_bytes(parquet_of([{"question": "a", "answer": "b"}]))
    with pytest.raises(ConfigError) as error:
        read_conversations(str(path), dialect, ConversationsConfig(), section="task")
    said = f"task.path: {path} row 0: it has 'question', 'answer'; write "
    assert str(error.value).startswith(said)
    assert str(error.value).endswith("or name their columns in task.columns")


# The Hub


@pytest.fixture(scope="module")
def commits(hub) -> list[str]:
    """Hashes of two commits of a dataset with two configs. The first has one row less."""
    card = "---\nconfigs:\n"
    for config in ("main", "other"):
        card += f"- config_name: {config}\n  data_files:\n"
        for split in ("train", "test"):
            card += f"  - split: {split}\n    path: {config}/{split}.parquet\n"
    tables = {"main/test.parquet": ROWS[:2], "other/train.parquet": ROWS[:3]}
    tables |= {"other/test.parquet": ROWS[:4]}
    files = {path: parquet_of(part) for path, part in tables.items()}
    files["README.md"] = f"{card}---\n".encode()
    older = hub.add(f"datasets/{NAME}", files | {"main/train.parquet": parquet_of(ROWS[1:])})
    files["main/train.parquet"] = parquet_of(ROWS)
    return [older, hub.repositories[f"datasets/{NAME}"].commit(files)]


def test_a_dataset_of_the_hub_is_read_by_config_split_and_revision(hub, commits):
    assert read(source()) == ROWS
    assert "other/train.parquet" not in str(hub.asked)
    assert read(source(split="test")) == ROWS[:2]
    assert read(source(dataset_config="other", split="test[1:]")) == ROWS[1:4]
    assert read(source(revision=commits[0])) == ROWS[1:]
    assert newest_commit(source(), "task.path") == commits[1]
    before = len(hub.asked)
    assert read(source(revision=commits[1])) == ROWS
    assert "main/train.parquet" not in str(hub.asked[before:])


WRONG = [
    (source("splits", split="tset"), "task.split is 'tset'; it must be one of 'train', 't"),
    (source("parts", split="a"), "task.split is 'a'; .* one of 'train', 'test'"),
    (source("rows.parquet", split="b"), "task.split is 'b'; .* one of 'train'"),
    (source("rows.jsonl", split="train"), "task.split: '.*rows.jsonl' has none"),
    (source("rows.parquet", revision="v"), "task.revision: '.*rows.parquet' has none"),
    (source("saved", dataset_config="a"), "task.dataset_config: '.*saved' has none"),
    (source("parts", dataset_config="a"), "task.dataset_config is 'a'; .* one of 'default'"),
    (source("cut.parquet"), "task.path: '.*cut.parquet' cannot be opened: Parquet"),
    (source("nothing"), "task.path: '.*nothing' cannot be opened: .* any data file"),
    (source("none.parquet"), "task.path: there is no file '.*none.parquet'"),
    (source(dataset_config=""), "task.dataset_config is ''; .* 'main', 'other'"),
    (source(dataset_config="a"), "task.dataset_config is 'a'; .* 'main', 'other'"),
    (source(split="val"), "task.split is 'val'; it must be one of 'train', 'test'"),
    (source(revision="v9"), "task.path: .* Revision 'v9' doesn't exist"),
    (source("tiller/none"), "task.path: 'tiller/none' .* doesn't exist .*HF_TOKEN"),
    (source("data/none.jsonl"), "there is no file 'data/none.jsonl'"),
]


def test_what_cannot_be_read_is_named_with_what_exists(commits, folder, monkeypatch):
    monkeypatch.chdir(folder)

    def check(row):
        with pytest.raises(ConfigError, match=row[1]):
            read(row[0])

    check_rows(WRONG, check)


def test_a_gated_dataset_needs_its_token(hub, commits, monkeypatch):
    hub.add("datasets/tiller/gated", {"train.jsonl": lines_of(ROWS)}, access="gated")
    gated = source("tiller/gated")
    with pytest.raises(ConfigError, match="^task.path: 'tiller/gated' .* gated .* HF_TOKEN"):
        read(gated)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert read(gated) == ROWS


def test_without_the_hub_the_cache_has_what_was_read_and_nothing_else(commits, variable):
    for commit in reversed(commits):
        read(source(revision=commit))
    variable("HF_HUB_OFFLINE", "1")
    assert read(source()) in (ROWS, ROWS[1:])
    assert read(source(revision=commits[1])) == ROWS
    assert read(source(revision=commits[0])) == ROWS[1:]
    with pytest.raises(ConfigError, match="^task.path: '.*sums' .* doesn't exist .* a cache"):
        read(source(revision="v1"))
    with pytest.raises(ConfigError, match="^task.path: 'tiller/new' cannot be opened: Couldn"):
        read(source("tiller/new"))


def test_a_folder_takes_precedence_over_a_name(commits, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiller").mkdir()
    (tmp_path / NAME).symlink_to(folder / "splits")
    assert read(source(dataset_config="", split="test")) == ROWS[:1]
    assert not is_hub_name(NAME) and is_hub_name("tiller/others")


# Forms of the common sets


def test_transcripts_are_conversations(dialect):
    """As Anthropic's HH-RLHF has them."""
    begin = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: 1 + 1?\n\nAssistant:"
    rows = [{"chosen": f"{begin} 2", "rejected": f"{begin} 3\n\nWhat else?"}]
    talk = [("user", "Hi"), ("assistant", "Hello."), ("user", "1 + 1?")]
    prompt = [{"role": role, "content": text} for role, text in talk]
    answers = {"chosen": "2", "rejected": "3\n\nWhat else?"}
    config = ConversationsConfig()
    (pair,) = read_preferences(rows, dialect, config)
    (wanted,) = read_preferences([{"prompt": prompt, **answers}], dialect, config)
    assert pair.prompt_tokens == wanted.prompt_tokens
    for own, other in zip(pair.examples, wanted.examples, strict=True):
        assert own.tokens.tolist() == other.tokens.tolist()
    with pytest.raises(ConfigError, match="field 'chosen' is 'Hi', without a 'prompt'"):
        read_preferences([{"chosen": "Hi", "rejected": "No"}], dialect, config)


# Memory


def test_stored_items_are_a_sequence_of_which_parts_can_be_taken(tmp_path):
    items = Stored(iter(ROWS), tmp_path)
    assert [*tmp_path.iterdir()] == []
    assert [*items] == ROWS and len(items) == len(ROWS) and items[-1] == ROWS[-1]
    assert [*items[2:9:3]] == ROWS[2:9:3]
    odd, even = parted(items, [number % 2 == 0 for number in range(len(items))])
    assert [*odd] == ROWS[1::2]
    assert isinstance(even, Stored) and [*even] == ROWS[::2] and [*even[1:3]] == ROWS[2:6:2]
    with pytest.raises(IndexError):
        even[10]


LIMITED = """
import resource, sys
from rl.data.sources import open_source
from rl.data.jsonl import read_rows
from rl.data.stored import kept

def used():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))

[*read_rows(sys.argv[2])]
assert not {"datasets", "pyarrow", "pandas"} & {*sys.modules}, "lines need none of them"
table = open_source(sys.argv[1])
next(read_rows(table))
limit = used() + (64 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
items = kept((row.value["text"] for row in read_rows(table)), table)
print(len(items), sum(map(len, items)))
"""


def test_rows_and_what_is_made_of_them_may_be_larger_than_memory(tmp_path):
    """The rows have 256 MiB, and the process may take 64 MiB of memory more than at its start."""
    schema = pa.schema({"text": pa.string()})
    with parquet.ParquetWriter(tmp_path / "large.parquet", schema) as writer:
        for number in range(64):
            text = chr(ord("a") + number % 26) * (1 << 20)
            writer.write_table(pa.table({"text": [text] * 4}, schema))
    (tmp_path / "rows.jsonl").write_bytes(lines_of(ROWS))
    paths = [str(tmp_path / name) for name in ("large.parquet", "rows.jsonl")]
    command = [sys.executable, "-c", LIMITED, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"256 {256 << 20}\n", done.stderr
