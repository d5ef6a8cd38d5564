"""Tests that need more of a machine than some machines allow."""

import os
from typing import NoReturn

import pytest


def cannot_run(reason: str) -> NoReturn:
    """Skip the test; fail it where the variable CI is set, since there every test must run."""
    if os.environ.get("CI"):
        pytest.fail(f"not run, as it must be in CI: {reason}", pytrace=False)
    pytest.skip(reason)
