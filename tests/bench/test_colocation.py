"""The benchmark of colocation: the same weights in less memory."""

import json

import pytest

from tests.bench.programs import python

pytestmark = pytest.mark.long


def test_by_turns_less_memory_is_taken_and_nothing_else_changes():
    printed = python("scripts/bench/colocation.py", "--steps", "1", "--json").splitlines()
    result = json.loads(printed[-1])
    assert result["colocated_over_separate"] < 0.7
    assert result["peak_bytes"]["separate"] > result["peak_bytes"]["colocated"] > 0
