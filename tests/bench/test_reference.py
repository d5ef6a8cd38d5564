"""The reference curves: the page shows what was recorded, and a run that differs is named."""

import json

import pytest

from tests import warm
from tests.kit.scripts import module_fixture

SCRIPT = "scripts/bench/reference.py"
TIMEOUT_S = 1800.0


bench = module_fixture(SCRIPT)


@pytest.fixture
def record(bench):
    return json.loads(bench.RECORD.read_text())


def test_the_page_shows_the_recorded_figures_of_five_seeds(bench, record, tmp_path):
    sizes = {name: [len(run) for run in runs] for name, runs in record.items()}
    assert sizes == dict.fromkeys(bench.RUNS, [bench.PARTS + 1] * 5)
    assert f"-->\n{bench.table(record)}<!--" in (bench.DOCS / "reference.md").read_text()
    bench.plot(record, tmp_path / "reference.png")
    assert (tmp_path / "reference.png").read_bytes().startswith(b"\x89PNG")


def test_recorded_runs_agree_and_a_run_that_learns_nothing_does_not(bench, record):
    for runs in record.values():
        assert [bench.differences(run, runs) for run in runs] == [[]] * 5
        named = [line.split(":")[0] for line in bench.differences([runs[0][0]] * 11, runs)]
        assert "part 10 of 10" in named or "score" in named


@pytest.mark.long
@pytest.mark.parametrize("names", ["quickstart", "tool_demonstrations tool_quickstart"])
def test_a_run_agrees_with_the_reference_curves(names):
    done = warm.run(SCRIPT, "--only", *names.split(), timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
