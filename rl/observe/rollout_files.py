"""Files of rollouts: every token that a step trained on, in columns."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.errors import RunError, error_text
from rl.host.disk import steps_in, write_whole
from rl.metrics import Value
from rl.types import Prompt, Rollout
from rl.types import Sequence as Tokens
from rl.types.routed_experts import RoutedExperts
from rl.types.sampling_mask import SamplingMask

if TYPE_CHECKING:
    import pyarrow as pa

OF_PROMPT = {
    "prompt_id": ("prompt_id", "int64"),
    "task": ("task", "string"),
    "prompt": ("text", "string"),
    "prompt_tokens": ("tokens", "int32[]"),
    "answer": ("answer", "string"),
}
"""Columns of a prompt: its attributes and their types."""

OF_ROLLOUT = {
    "sample": "int32",
    "reward": "float64",
    "turn_rewards": "float64[]",
    "turn_lengths": "int32[]",
    "turn_order": "int32[]",
    "players": "int32[]",
    "cut_turns": "int32",
    "text": "string",
    "stop_reason": "string",
}
"""Columns of a rollout, and their types."""

OF_SEQUENCE = {
    "tokens": np.int32,
    "sampled": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
}
"""Columns of a sequence that the engine saw, and their types."""

OF_MASK = {"mask_sizes": "sizes", "mask_words": "words"}
"""Columns of a sampling mask, and their names in it; files without masks lack them."""

EXPERTS = "experts"
"""Column of the experts of a sequence, an array in the format of NumPy's files; files without
records lack it."""

SAMPLE_COLUMNS = ("prompt_id", "sample", "prompt", "answer", "text", "reward", "stop_reason")
"""Columns of rollouts that people read."""

Columns = Mapping[str, np.ndarray]
"""Further values by name, float32 [T], one for each token of all sequences, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rollouts that were trained on together, or evaluated in the same way, in order."""

    rollouts: Sequence[Rollout]
    columns: Columns
    """Values of the tokens, such as ``advantages`` and ``trainer_logprobs``."""


def write_rollouts(
    path: Path, chunks: Sequence[Chunk], *, version: int = 0, only: Sequence[int] | None = None
) -> None:
    """Write the rollouts of a step as a Parquet file, one row per rollout. On disk on return.

    ``version`` is the policy version that was trained. ``only`` are indices of the rows to keep.
    All chunks have the same columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rollouts = [rollout for chunk in chunks for rollout in chunk.rollouts]
    numbers = [number for number, chunk in enumerate(chunks) for _ in chunk.rollouts]
    columns = {"chunk": pa.array(numbers, pa.int32())}
    for name, (attribute, kind) in OF_PROMPT.items():
        columns[name] = _column([getattr(rollout.prompt, attribute) for rollout in rollouts], kind)
    for name, kind in OF_ROLLOUT.items():
        columns[name] = _column([getattr(rollout, name) for rollout in rollouts], kind)
    columns["metrics"] = _column([json.dumps(rollout.metrics) for rollout in rollouts], "string")
    columns["sequences"] = _sequence_lists(chunks, rollouts)
    table = pa.table(columns).replace_schema_metadata({"version": str(version)})
    if only is not None:
        table = table.take([*only])
    # without dictionaries and statistics it is quicker, and smaller for the few rows of a step
    plain = {"use_dictionary": False, "write_statistics": False}
    options = {"compression": "zstd", "write_page_checksum": True, **plain}
    write_whole(path, lambda file: parquet.write_table(table, file, **options))


def read_rollouts(path: Path) -> list[Chunk]:
    """Return the chunks that ``write_rollouts`` wrote, bit for bit.

    Raises RunError if the file is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        table = parquet.read_table(path, page_checksum_verification=True)
        rows = table.drop_columns("sequences").to_pylist()
        sequences = _sequences(table["sequences"].combine_chunks())
        rollouts = [_rollout(row, tokens) for row, (tokens, _) in zip(rows, sequences, strict=True)]
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise RunError(f"{path} cannot be read: {error_text(error)}") from error
    numbers = [row["chunk"] for row in rows]
    chunks = []
    for number in dict.fromkeys(numbers):
        rows_here = [index for index, chunk_number in enumerate(numbers) if chunk_number == number]
        columns = [sequences[index][1] for index in rows_here]
        names = columns[0]
        joined = {name: np.concatenate([arrays[name] for arrays in columns]) for name in names}
        chunks.append(Chunk(rollouts=[rollouts[index] for index in rows_here], columns=joined))
    return chunks


def read_samples(path: Path, count: int) -> list[list[Any]]:
    """Return SAMPLE_COLUMNS of ``count`` rollouts, or fewer, from all parts of a file."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(path, columns=[*SAMPLE_COLUMNS])
    every = max(1, -(-len(table) // count))
    return [[*row.values()] for row in table.take([*range(0, len(table), every)]).to_pylist()]


def read_groups(path: Path) -> dict[int, list[Rollout]]:
    """Return the groups of a checkpoint by prompt_id, in the order in which they were written.

    Raises RunError if the file is missing or damaged.
    """
    try:
        chunks = read_rollouts(path)
    except RunError as error:
        advice = f"deleting {path.parent} goes back to the checkpoint before it"
        raise RunError(f"{error}; {advice}") from error
    groups: dict[int, list[Rollout]] = {}
    for rollout in chain.from_iterable(chunk.rollouts for chunk in chunks):
        groups.setdefault(rollout.prompt.prompt_id, []).append(rollout)
    return groups


def _column(values: Sequence[Any], kind: str) -> "pa.Array":
    """Return a column of values. A lone surrogate, which UTF-8 lacks, becomes a question mark."""
    import pyarrow as pa

    if kind == "string":
        values = [text.encode(errors="replace").decode() for text in values]
    item = pa.type_for_alias(kind.removesuffix("[]"))
    return pa.array(values, pa.list_(item) if kind.endswith("[]") else item)


def _sequence_lists(chunks: Sequence[Chunk], rollouts: Sequence[Rollout]) -> "pa.Array":
    """Return each rollout's list of sequences, whose columns are lists of values of tokens."""
    import pyarrow as pa

    sequences = [seq for rollout in rollouts for seq in rollout.sequences]
    ends = _ends([len(seq) for seq in sequences])
    columns = {
        name: np.concatenate([np.empty(0, kind), *(getattr(seq, name) for seq in sequences)])
        for name, kind in OF_SEQUENCE.items()
    }
    for name in chunks[0].columns if chunks else ():
        columns[name] = np.concatenate([chunk.columns[name] for chunk in chunks])
    lists = {name: pa.ListArray.from_arrays(ends, pa.array(data)) for name, data in columns.items()}
    masks = [seq.sampling_mask for seq in sequences]
    if any(mask is not None for mask in masks):
        none = np.empty(0, np.int32)
        for name, part in OF_MASK.items():
            values = [none if mask is None else getattr(mask, part) for mask in masks]
            offsets = pa.array(np.cumsum([0, *map(len, values)]), pa.int64())  # may need 64 bits
            flat = pa.array(np.concatenate([none, *values]))
            lists[name] = pa.LargeListArray.from_arrays(offsets, flat)
    if any(seq.experts is not None for seq in sequences):
        lists[EXPERTS] = pa.array(map(_experts_file, sequences), pa.large_binary())
    structs = pa.StructArray.from_arrays([*lists.values()], names=[*lists])
    counts = [len(rollout.sequences) for rollout in rollouts]
    return pa.ListArray.from_arrays(_ends(counts), structs)


def _experts_file(sequence: Tokens) -> bytes | None:
    if sequence.experts is None:
        return None
    file = io.BytesIO()
    np.save(file, sequence.experts.ids)
    return file.getvalue()


def _ends(lengths: Sequence[int]) -> "pa.Array":
    import pyarrow as pa

    return pa.array(np.cumsum([0, *lengths]), pa.int32())


def _sequences(lists: "pa.ListArray") -> list[tuple[tuple[Tokens, ...], dict[str, np.ndarray]]]:
    """Return each rollout's sequences, and its further columns."""
    structs = lists.flatten()
    names = [field.name for field in structs.type if field.name != EXPERTS]
    columns: dict[str, Sequence[Any]] = {}
    if len(names) < len(structs.type):
        columns[EXPERTS] = structs.field(EXPERTS).to_pylist()
    for name in names:
        column = structs.field(name)
        values = column.flatten().to_numpy(zero_copy_only=False)
        cuts = np.cumsum(column.value_lengths().to_numpy())[:-1]
        columns[name] = np.split(values, cuts) if len(column) else []
    sequences = []
    start = 0
    for count in lists.value_lengths().to_pylist():
        rows = range(start, start + count)
        start += count
        mine = tuple(_tokens(columns, row) for row in rows)
        others = {
            name: np.concatenate([columns[name][row] for row in rows])
            for name in names
            if name not in OF_SEQUENCE and name not in OF_MASK
        }
        sequences.append((mine, others))
    return sequences


def _tokens(columns: Mapping[str, Sequence[Any]], row: int) -> Tokens:
    mask = None
    file = columns[EXPERTS][row] if EXPERTS in columns else None
    if all(name in columns for name in OF_MASK) and len(columns["mask_sizes"][row]):
        mask = SamplingMask(**{part: columns[name][row] for name, part in OF_MASK.items()})
    return Tokens(
        **{name: columns[name][row] for name in OF_SEQUENCE},
        sampling_mask=mask,
        experts=None if file is None else RoutedExperts(np.load(io.BytesIO(file))),
    )


def _rollout(row: dict[str, Any], sequences: tuple[Tokens, ...]) -> Rollout:
    values: dict[str, Any] = {
        name: tuple(row.get(name, ())) if kind.endswith("[]") else row[name]
        for name, kind in OF_ROLLOUT.items()
    }
    return Rollout(
        prompt=Prompt(**{attribute: row[name] for name, (attribute, _) in OF_PROMPT.items()}),
        sequences=sequences,
        metrics={
            name: Value(*entry) if isinstance(entry, list) else entry
            for name, entry in json.loads(row["metrics"]).items()
        },
        **values,
    )


class RolloutFolder:
    """Files ``step-N.parquet`` of the rollouts of a run, or of its evaluations, and
    ``failed.parquet`` of a failure.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._bytes: int | None = None

    def path(self, step: int) -> Path:
        """Return the file of ``step``, whether it exists or not."""
        return self.folder / f"step-{step}.parquet"

    @property
    def failed(self) -> Path:
        """File of the rollouts with which a call failed."""
        return self.folder / "failed.parquet"

    def steps(self) -> list[int]:
        """Return the steps that have a file, in order."""
        return steps_in(self.folder, ".parquet")

    @property
    def bytes(self) -> int:
        """Disk space of all files, in bytes."""
        if self._bytes is None:
            self._bytes = sum(path.stat().st_size for path in _files(self.folder))
        return self._bytes

    def write(self, step: int, chunks: Sequence[Chunk], **options: Any) -> None:
        """Write the file of ``step``: see ``write_rollouts``. A file of this step is replaced."""
        self.folder.mkdir(exist_ok=True)
        path = self.path(step)
        before = self.bytes - (path.stat().st_size if path.exists() else 0)
        write_rollouts(path, chunks, **options)
        self._bytes = before + path.stat().st_size

    def remove(self, step: int) -> None:
        """Delete the file of ``step``."""
        path = self.path(step)
        self._bytes = self.bytes - path.stat().st_size
        path.unlink()

    def drop_after(self, step: int) -> None:
        """Delete the files of the steps after ``step``, of a failure, and what a killed write
        left.
        """
        self._bytes = None
        self.failed.unlink(missing_ok=True)
        for path in _files(self.folder):
            if path.suffix == ".partial":
                path.unlink()
        for later in self.steps():
            if later > step:
                self.path(later).unlink()


def delete_oldest(folders: Sequence[RolloutFolder], max_bytes: float, *, keep: Path) -> None:
    """Delete the files of the oldest steps until all ``folders`` together have at most
    ``max_bytes``. The file ``keep`` stays.
    """
    if sum(folder.bytes for folder in folders) <= max_bytes:
        return
    files = [(step, place) for place, folder in enumerate(folders) for step in folder.steps()]
    for step, place in sorted(files):
        if folders[place].path(step) != keep:
            folders[place].remove(step)
            if sum(folder.bytes for folder in folders) <= max_bytes:
                return


def _files(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())
