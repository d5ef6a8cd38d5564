"""The benchmark of the push: every transport in one run, and the keys that budgets are read
from.
"""

import json

import pytest

from tests.bench.programs import python

pytestmark = pytest.mark.long

SCRIPT = "scripts/bench/weight_push.py"


def test_all_transports_are_measured_and_the_last_line_is_json():
    *table, last = python(SCRIPT, "--tiny", "--rounds", "2", "--json").splitlines()
    result = json.loads(last)
    assert list(result["transports"]) == ["shared_memory", "tcp", "rdma", "torchstore"]
    for row in result["transports"].values():
        assert 0 < row["pull_over_memcpy"] < row["total_over_memcpy"]
    ours = result["transports"]["shared_memory"]
    assert result["pull_over_memcpy"] == ours["pull_over_memcpy"]
    assert result["torchstore_over_ours"] > 1
    assert [row["generators"] for row in result["sizes"]] == [1, 2, 4]
    assert len(table) == 2 + 4 + 3
