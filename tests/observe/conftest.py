"""Fixtures of the tests of records and sinks."""

import pytest


@pytest.fixture
def warnings() -> list[str]:
    """Texts of warnings."""
    return []
