"""Tables of cases that one test checks."""

from collections.abc import Callable, Container, Iterable
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet

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


def long(*values: Any, **options: Any) -> ParameterSet:
    """Return a case that runs in the long tests only."""
    return pytest.param(*values, marks=pytest.mark.long, **options)


def cases(rows: Iterable[Row], often: Container[Row]) -> list[Row | ParameterSet]:
    """Return a case for each row. Rows that are not in ``often`` run in the long tests only."""
    return [row if row in often else long(row) for row in rows]
