"""The benchmark of the gateway against vLLM's own server."""

import json

import pytest

from tests.kit.scripts import module, python

SCRIPT = "scripts/bench/gateway.py"


def test_ratios_are_those_of_each_round_and_above_1_if_ours_is_better(monkeypatch):
    bench = module(SCRIPT, monkeypatch)
    rounds = [
        (bench.Measured(80.0, 0.010), bench.Measured(100.0, 0.008)),
        (bench.Measured(90.0, 0.010), bench.Measured(90.0, 0.012)),
        (bench.Measured(60.0, 0.010), bench.Measured(50.0, 0.010)),
    ]
    result = bench.result_of(rounds)
    assert (result["ours_over_vllm"], result["vllm_over_ours_cpu"]) == (1.0, 1.0)
    assert result["spread"]["ours_over_vllm"] == [0.8, 1.2]
    assert result["spread"]["vllm_over_ours_cpu"] == pytest.approx([0.8, 1.2])
    assert result["requests_per_s"] == {"ours": 80.0, "vllm": 90.0}
    assert result["cpu_s"] == {"ours": 0.010, "vllm": 0.010}


@pytest.mark.long
def test_both_servers_answer():
    said = python(SCRIPT, "--rounds", "1", "--requests", "8", "--json")
    assert json.loads(said.splitlines()[-1])["requests_per_s"].keys() == {"ours", "vllm"}
