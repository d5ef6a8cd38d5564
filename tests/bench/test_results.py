"""Every benchmark describes itself, measures all sides in one run, and ends with one JSON object,
which has the keys that budgets are read from.
"""

import json
import shlex
from typing import Any

import pytest

from rl.weights.transport import NETWORKS
from tests.kit.scripts import ROOT, module, python

Result = dict[str, Any]


def test_every_benchmark_describes_itself_and_prints_json(monkeypatch, capsys):
    scripts = [
        path for path in (ROOT / "scripts/bench").glob("*.py") if "--json" in path.read_text()
    ]
    assert len(scripts) > 10
    for path in scripts:
        bench = module(f"scripts/bench/{path.name}", monkeypatch)
        monkeypatch.setattr("sys.argv", [path.name, "--help"])
        with pytest.raises(SystemExit) as end:
            bench.main()
        assert end.value.code == 0, path.name
        assert "--json" in capsys.readouterr().out, path.name


def check_algorithms(result: Result, table: list[str]) -> None:
    assert result["solved"] == []
    assert len(result["algorithms"]["dppo"]["rewards"][0]) == 2


def check_budgets(result: Result, table: list[str]) -> None:
    rows = result["budgets"]
    assert [row["key"] for row in rows] == ["first_page_s", "bytes"]
    assert [row["budget"] for row in rows] == ["≤ 2", "≤ 500000"]
    for row in rows:
        assert row["rounds"] == 2
        low, high = row["spread"]
        assert 0 < low <= row["median"] <= high
        assert row["holds"] == (row["median"] <= float(row["budget"].removeprefix("≤ ")))
    assert len(table) == 2 + 2 + len(rows)


def check_colocation(result: Result, table: list[str]) -> None:
    assert result["colocated_over_separate"] < 0.7
    assert result["peak_bytes"]["separate"] > result["peak_bytes"]["colocated"] > 0


def check_controller(result: Result, table: list[str]) -> None:
    rows = result["pipelines"]
    kinds = [(row["pipeline"], row["max_staleness"]) for row in rows]
    assert kinds == [(each, age) for each in ("deterministic", "asynchronous") for age in (0, 2)]
    for row in rows:
        assert 0 <= row["staleness"] <= row["max_staleness"]
        assert row["cost_growth"] > 0 < row["cpu_us_per_rollout_short"]
        assert row["memory_growth"] > 0
    assert rows[1]["staleness"] == 2
    assert result["rollouts_per_s"] == min(row["rollouts_per_s"] for row in rows)
    assert result["cost_growth"] == max(row["cost_growth"] for row in rows)
    growths = [row["cost_growth"] for row in result["generators"]]
    assert result["cost_growth_generators"] == max(growths) > 0
    assert len(table) == len(rows) + len(growths) + 2
    assert 0 < result["checkpoint_pause_s"] < result["checkpoint_s"]
    assert 4 <= result["order_bytes_per_prompt"] < 5
    assert 0 < result["checkpoint_message_bytes"] < 1024 * 32 * 16  # rollouts are not sent


def check_episodes(result: Result, table: list[str]) -> None:
    assert min(result[name] for name in ("ours_over_engine", "cpu_us_per_turn", "cost_growth")) > 0
    # two turns: 96 given, 8 sampled and 8 given tokens, of which three whole blocks are cached
    assert result["cached"] == 96 / 112
    assert f"{result['episodes']} episodes at once" in "".join(table)


def check_generator(result: Result, table: list[str]) -> None:
    assert result["greedy_alike"] == 1.0
    assert 0 < result["logprobs_apart"] < 1e-5
    assert result["tokens_per_s"].keys() == {"one_call", "groups", "unified_eager", "native_eager"}
    assert result["unified_over_native"] == result["unified_over_native_eager"] > 0


def check_delta_net(result: Result, table: list[str]) -> None:
    (case,) = result["cases"]
    assert 0 < case["delta_over_attention"] == result["delta_over_attention_max"]
    assert "attention" in table[0]


def check_layouts(result: Result, table: list[str]) -> None:
    assert [row["name"] for row in result["layouts"]] == ["fsdp2", "moe-ep2"]
    assert len(table) == 4
    for row in result["layouts"]:
        assert (row["ok"], row["moved_to"]) == (True, "1-rank")
        assert 0 < row["loss_delta"] <= result["max_loss_delta"] <= 1e-4
        assert 0 < row["whole_grad_error"] < row["grad_error"] <= result["max_grad_error"] <= 1e-5
        assert 0 < row["moved_loss_delta"] <= 1e-5


def check_overlap(result: Result, table: list[str]) -> None:
    modes = result["modes"]
    assert [*modes] == [
        *("lockstep", "deterministic 1", "deterministic 2"),
        *("asynchronous 2", "asynchronous 2, in 4 chunks"),
    ]
    longest = max(modes["lockstep"]["generate_s"], modes["lockstep"]["train_s"])
    for row in modes.values():
        assert row["step_over_max_stage"] == row["step_s"] / longest > 0
        assert max(map(int, row["staleness"])) <= row["max_staleness"]
    assert modes["lockstep"]["staleness"].keys() == {"0"}
    assert "2" in modes["deterministic 2"]["staleness"]
    assert result["step_over_max_stage"] == modes["asynchronous 2"]["step_over_max_stage"]
    assert result["two_over_one"] > 0


def check_plain_grpo(result: Result, table: list[str]) -> None:
    assert 0.9 <= result["exact_match"] <= 1.0
    assert result["cpu_s"] > 0


def check_plain_loop(result: Result, table: list[str]) -> None:
    low, high = result["spread"]
    assert low == high == result["ours_over_plain"]
    assert result["ours_over_plain"] == result["cpu_s_ours"] / result["cpu_s_plain"]
    assert result["steps_plain"] > 0 and result["steps_ours"] % 10 == 0


def check_processes(result: Result, table: list[str]) -> None:
    (found,) = result.values()
    for part in ("start", "step"):
        cpu = found[f"{part}_cpu_s"]
        assert {"controller", "trainer-0", "generator-0-0", "reward-0-0"} <= {*cpu}
        assert min(cpu["trainer-0"], cpu["generator-0-0"]) > 0.01
        assert found[f"{part}_wall_s"] > 0


def check_push_network(result: Result, table: list[str]) -> None:
    low, high = result["fetch_over_sockets_spread"]
    assert 0 < low <= result["fetch_over_sockets"] <= high
    assert result["sent_over_model"] == {"1": 1.0, "2": 1.0, "4": 1.0}
    assert result["link_gb_per_s"] > 0
    low, high = result["collective_over_plain_spread"]
    assert 0 < low <= result["collective_over_plain"] <= high
    assert result["collective_sent_over_model"] == {"1": 1.0, "2": 1.0, "4": 1.0}
    assert result["plain_gb_per_s"] > 0


def check_recording(result: Result, table: list[str]) -> None:
    assert result["lowest"] <= result["recorded_over_bare"] <= result["highest"]
    assert result["step_s"].keys() == {"metrics", "everything"}
    assert min(*result["kib_per_step"].values(), result["events_kib_per_step"]) > 0.5


def check_trainer(result: Result, table: list[str]) -> None:
    budgets = {"ours_over_bare", "ours_over_transformers", "naive_over_ours_logprob_memory"}
    assert budgets < result.keys()
    assert min(result.values()) > 0
    assert result["loss_spread"] < 1e-6
    assert 2 < result["naive_over_ours_logprob_memory"] < 8


def check_view(result: Result, table: list[str]) -> None:
    assert result["steps"] == 50
    assert min(result[name] for name in ("first_page_s", "refresh_s", "rollouts_s")) > 0
    assert 10_000 < result["bytes"] <= 500_000


def check_weight_push(result: Result, table: list[str]) -> None:
    transports = result["transports"]
    assert [*transports] == ["shared_memory", *NETWORKS]
    for row in transports.values():
        assert 0 < row["pull_over_memcpy"] < row["total_over_memcpy"]
    assert result["pull_over_memcpy"] == transports["shared_memory"]["pull_over_memcpy"]
    assert result["torchstore_over_ours"] > 1
    assert [row["generators"] for row in result["sizes"]] == [1, 2, 4]
    assert len(table) == 2 + len(result["transports"]) + 3


BENCHMARKS = {
    "algorithms": ("--tiny --seeds 1 --steps 2 --only dppo --json", check_algorithms),
    "budgets": ("--only view --rounds 2 --json", check_budgets),
    "colocation": ("--steps 1 --json", check_colocation),
    "controller": ("--tiny --repeats 1 --json", check_controller),
    "delta_net": ("--tiny --rounds 1 --json", check_delta_net),
    "episodes": ("--tiny --rounds 1 --repeats 1 --json", check_episodes),
    "generator": ("--tiny --rounds 2 --no-compile --json", check_generator),
    "layouts": ("--only fsdp2 moe-ep2 --json", check_layouts),
    "overlap": ("--tiny --rounds 1 --steps 2 --json", check_overlap),
    "plain_grpo": ("0 0.9 10", check_plain_grpo),
    "plain_loop": ("--rounds 1 --only 0.1m --json", check_plain_loop),
    "processes": ("--only quickstart,\\ lockstep --steps 5 --json", check_processes),
    "push_network": ("--megabytes 8 --rounds 2 --json", check_push_network),
    "recording": ("--rounds 2 --steps 2 --json", check_recording),
    "trainer": ("--tiny --repeats 2 --plot {folder}/memory.png --json", check_trainer),
    "view": ("--steps 50 --repeats 1 --json", check_view),
    "weight_push": ("--tiny --rounds 2 --json", check_weight_push),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_measures_all_sides_and_its_last_line_is_json(name, tmp_path):
    arguments, check = BENCHMARKS[name]
    words = shlex.split(arguments.format(folder=tmp_path))
    *table, last = python(f"scripts/bench/{name}.py", *words).splitlines()
    check(json.loads(last), table)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
