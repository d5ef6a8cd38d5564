"""Tables of cases that one test checks."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Row = TypeVar("Row")


def check_rows(rows: Iterable[Row], check: Callable[[Row], None]) -> None:
    """Call ``check`` with each row, and fail with every row that failed and why."""
    failed = []
    for row in rows:
        try:
            check(row)
        except (Exception, pytest.fail.Exception) as error:
            failed.append(f"{row}: {type(error).__name__}: {error}")
    assert not failed, "\n\n".join(failed)
