"""The benchmark of the push over TCP: the bytes of the trainer, and the keys of the result."""

import json

import pytest

from tests.bench.programs import python

pytestmark = pytest.mark.long


def test_the_trainer_sends_the_model_once_and_the_last_line_is_json():
    script = ("scripts/bench/push_network.py", "--megabytes", "8", "--rounds", "2", "--json")
    *_, last = python(*script).splitlines()
    result = json.loads(last)
    low, high = result["over_link_spread"]
    assert 0 < low <= result["over_link"] <= high
    assert result["sent_over_model"] == {"1": 1.0, "2": 1.0, "4": 1.0}
    assert result["link_gb_per_s"] > 0
