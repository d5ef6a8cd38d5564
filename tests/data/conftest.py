import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.dialects.choose import dialect_of
from rl.dialects.dialect import Dialect
from tests.kit.tokenizers import qwen3


@pytest.fixture(scope="session")
def dialect() -> Dialect:
    return dialect_of(qwen3())


@pytest.fixture
def write(tmp_path) -> Callable[..., str]:
    """Writes rows, or lines that are bytes already, to a JSONL file and returns its path."""

    def writes(*rows) -> str:
        path = Path(tmp_path / "data.jsonl")
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows]
        path.write_bytes(b"".join(lines))
        return str(path)

    return writes
