"""Recorded rollouts of a step or an evaluation: a table of all, and all tokens of one."""

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from rl.errors import error_text
from rl.host.disk import steps_in
from rl.observe.events import finite

ROWS = 4_096
"""Rows of the table of a step."""
TOKENS = 20_000
"""Tokens of a rollout that a page gets."""
CHARS = 100_000
"""Characters of a text that a page gets."""
PREVIEW = 160
"""Characters of a text in the table."""
KNOWN = ("tokens", "sampled", "logprobs", "versions")
HIDDEN = ("mask_sizes", "mask_words")
"""Columns of sampling masks, which pages do not show."""


class Rollouts:
    """Files of the rollouts of a run, in the folder ``name`` of its run folder."""

    def __init__(self, folder: Path, name: str = "rollouts"):
        self._run = folder
        self._folder = folder / name

    def steps(self) -> list[int]:
        """Return the steps whose rollouts are recorded, in order."""
        return steps_in(self._folder, ".parquet")

    def table(self, step: int) -> dict[str, Any]:
        """Return a row for each rollout of ``step``, without its tokens."""
        path = self.path(step)
        try:
            return _table(path, path.stat().st_mtime_ns, self._tokenizer)
        except Exception as error:
            return {"error": f"{path.name} cannot be read: {error_text(error)}", "rows": []}

    def last_answers(self, step: int, indices: Sequence[int]) -> list[str | None]:
        """Return the beginning of the last answer of each rollout of ``indices``; None for a
        rollout whose text is its answer.
        """
        import pyarrow as pa
        import pyarrow.parquet as parquet

        names = ["turn_lengths", "sequences.list.element.tokens", "sequences.list.element.sampled"]
        table = parquet.ParquetFile(self.path(step)).read(columns=names)
        return _last_answers(table.take(pa.array(indices, pa.int64())), self._tokenizer)

    def rollout(self, step: int, index: int) -> dict[str, Any]:
        """Return all of one rollout, with its tokens as text if the run has a tokenizer."""
        path = self.path(step)
        try:
            row = _one(path, index)
        except Exception as error:
            return {"error": f"{path.name}, rollout {index}, cannot be read: {error_text(error)}"}
        for sequence in row["sequences"]:
            sequence["texts"] = [self._text([token]) for token in sequence["tokens"]]
            sequence["control"] = [token in self._control for token in sequence["tokens"]]
            sequence["turns"] = [
                {"sampled": sampled, "count": len(tokens), "parts": self._parts(sampled, tokens)}
                for sampled, tokens in _turns(sequence)
            ]
        return row

    def path(self, step: int) -> Path:
        """Return the file of ``step``, whether it exists or not."""
        return self._folder / f"step-{step}.parquet"

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        for name in ("tokenizer", "export"):
            path = self._run / name / "tokenizer.json"
            if path.is_file():
                try:
                    return Tokenizer.from_file(str(path))
                except Exception:  # of a file that is damaged, or of another version
                    continue
        return None

    @cached_property
    def _control(self) -> set[int]:
        """Ids of the control tokens."""
        return {*self._tokenizer.get_added_tokens_decoder()} if self._tokenizer else set()

    def _parts(self, sampled: bool, tokens: list[int]) -> list[list[str]] | None:
        """Return ``[kind, text]`` of each part of a turn; None if the run has no tokenizer. The
        kinds are ``control`` for control tokens, ``tools`` for schemas in a fed turn, and ``text``.
        """
        parts: list[list[str]] = []
        for control, run in groupby(tokens, self._control.__contains__):
            if (text := self._text([*run])) is None:
                return None
            if control:
                parts.append(["control", text])
            else:
                parts += [["text", text]] if sampled else _schemas(text)
        return parts

    def _text(self, tokens: list[int]) -> str | None:
        """Return the text of tokens; None if the run has no tokenizer."""
        if self._tokenizer is None or any(token < 0 for token in tokens):
            return None
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _turns(sequence: dict[str, Any]) -> list[tuple[bool, list[int]]]:
    """Return the runs of tokens that were fed, and of those that were sampled."""
    tokens = zip(sequence["sampled"], sequence["tokens"], strict=False)
    return [(sampled, [word for _, word in run]) for sampled, run in groupby(tokens, itemgetter(0))]


def _schemas(text: str) -> list[list[str]]:
    """Return the parts of ``text``, ``["tools", part]`` for schemas of tools in JSON."""
    parts = [["text", ""]]
    end = 0
    for match in re.finditer(r"^[\[{]", text, re.MULTILINE):
        begin = match.start()
        try:
            value, after = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError):
            continue
        if begin < end or not _is_schema(value):
            continue
        if parts[-1][0] == "text" or text[end:begin].strip():
            parts += [["text", text[end:begin]], ["tools", text[begin:after]]]
        else:
            parts[-1][1] += text[end:after]
        end = after
    return [part for part in [*parts, ["text", text[end:]]] if part[1]]


def _is_schema(value: Any) -> bool:
    """Whether a value is the schema of a tool, or a list of them."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_schema, value))
    function = value.get("function", value) if isinstance(value, dict) else None
    return isinstance(function, dict) and {"name", "parameters"} <= {*function}


def _version(metadata: dict[bytes, bytes] | None) -> int | None:
    text = (metadata or {}).get(b"version", b"")
    return int(text) if text.isdigit() else None


@lru_cache(maxsize=8)
def _table(path: Path, changed: int, tokenizer: Any) -> dict[str, Any]:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    wanted = ("prompt_id", "sample", "task", "reward", "prompt", "text", "stop_reason")
    names = file.schema_arrow.names
    table = file.read(columns=[*wanted, "turn_lengths", "sequences"])
    left_out = max(0, table.num_rows - ROWS)
    table = table.slice(0, ROWS)
    version = _version(file.schema_arrow.metadata)
    columns = _of_tokens(table, version) if "sequences" in names else {}
    for name in wanted:
        if name in names:
            values = table[name].to_pylist()
            shared = shared_lines(values) if name == "prompt" else ""
            columns[name] = [shortened(value, shared) for value in values]
    if "text" in names:
        answers = _last_answers(table, tokenizer)
        columns["text"] = [
            text if answer is None else answer
            for text, answer in zip(columns["text"], answers, strict=True)
        ]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {"version": version, "rows": finite(rows), "left_out": left_out}


def shared_lines(texts: Sequence[str]) -> str:
    """Return the lines with which all texts begin, such as a system prompt."""
    beginning = commonprefix(texts) if len({*texts}) > 1 else ""  # noqa: RUF071  # no paths
    return beginning[: beginning.rfind("\n") + 1]


def shortened(value: Any, beginning: str = "") -> Any:
    """Return PREVIEW characters of a text, without its ``beginning``; any other value as it is."""
    return value.removeprefix(beginning)[:PREVIEW] if isinstance(value, str) else value


def _last_answers(table: Any, tokenizer: Any) -> list[str | None]:
    """Return the beginning of the last answer of each episode, whose ``text`` has all turns."""
    if tokenizer is None or not {"turn_lengths", "sequences"} <= {*table.column_names}:
        return [None] * table.num_rows
    answers: list[str | None] = []
    for lengths, sequences in zip(table["turn_lengths"], table["sequences"], strict=True):
        if not len(lengths) or not len(sequences):
            answers.append(None)
            continue
        last = sequences.values[-1]
        sampled = last["sampled"].values.to_numpy(zero_copy_only=False).astype(np.int8)
        begins = np.flatnonzero(np.diff(sampled, prepend=0) > 0)
        begin = begins[-1] if len(begins) else len(sampled)
        tokens = last["tokens"].values.to_numpy()[begin:][sampled[begin:] > 0]
        answers.append(shortened(tokenizer.decode(tokens[:PREVIEW].tolist())))
    return answers


def _of_tokens(table: Any, version: int | None) -> dict[str, list[Any]]:
    """Return numbers of each rollout over its sampled tokens, by name."""
    import pyarrow as pa

    lists = pa.concat_arrays(table["sequences"].chunks)
    count = len(lists)
    structs = lists.flatten()
    of_sequence = np.repeat(np.arange(count), lists.value_lengths().fill_null(0).to_numpy())
    fields = {field.name: structs.field(field.name) for field in structs.type}
    lengths = fields["tokens"].value_lengths().fill_null(0).to_numpy()
    values = {name: data.flatten().to_numpy(zero_copy_only=False) for name, data in fields.items()}
    sampled = values["sampled"].astype(bool)
    row = np.repeat(of_sequence, lengths)[sampled]
    numbers = np.bincount(row, minlength=count)

    def mean(column: np.ndarray) -> list[float]:
        sums = np.bincount(row, weights=column[sampled], minlength=count)
        return list((sums / np.maximum(numbers, 1)).tolist())

    columns = {
        "turns": lists.value_lengths().fill_null(0).to_pylist(),
        "length": numbers.tolist(),
        "tokens": np.bincount(of_sequence, weights=lengths, minlength=count).astype(int).tolist(),
    }
    if version is not None:
        columns["staleness"] = mean(version - values["versions"].astype(float))
    for name, column in (("advantage", "advantages"), ("entropy", "entropy")):
        if column in values:
            columns[name] = mean(values[column])
    columns["logprob"] = mean(values["logprobs"])
    if "trainer_logprobs" in values:
        gap = np.abs(values["trainer_logprobs"] - values["logprobs"])[sampled]
        largest = np.zeros(count)
        np.maximum.at(largest, row, gap)
        columns["gap"] = largest.tolist()
    return columns


def _one(path: Path, index: int) -> dict[str, Any]:
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    content: dict[str, Any] = {"version": _version(file.schema_arrow.metadata), "cut": []}
    table = file.read()
    if not 0 <= index < table.num_rows:
        raise IndexError(f"the file has {table.num_rows} rollouts")
    row = table.slice(index, 1).to_pylist()[0]
    for name, value in row.items():
        if name not in ("sequences", "prompt_tokens"):
            content[name] = value
        if isinstance(value, str) and len(value) > CHARS:
            content[name] = value[:CHARS]
            content["cut"].append(f"{name}: {CHARS:,} of {len(value):,} characters")
    try:
        content["metrics"] = json.loads(content.get("metrics") or "{}")
    except ValueError:
        content["metrics"] = {}
    content["sequences"] = []
    left = TOKENS
    for sequence in row.get("sequences") or []:
        length = len(sequence["tokens"])
        if length > left:
            content["cut"].append(f"tokens: {left:,} of {length:,} of a sequence")
        shown = {name: column for name, column in sequence.items() if name not in HIDDEN}
        columns = {
            # nine digits determine a float32
            name: [float(f"{x:.9g}") if isinstance(x, float) else x for x in values[:left]]
            for name, values in shown.items()
            if values is not None
        }
        others = {name: columns[name] for name in columns if name not in KNOWN}
        known = {name: columns.get(name, []) for name in KNOWN}
        content["sequences"].append(known | {"columns": others})
        left = max(0, left - length)
    return dict(finite(content))
