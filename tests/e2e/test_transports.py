"""The weights that arrive do not depend on what carries them (C3)."""

import pytest

from tests.e2e.runs import TINY, Run

RUN = [*TINY, "--steps", "4", "--weights.digests", "--quiet"]
TRANSPORTS = {
    "rdma": ["--weights.transport", "rdma"],
    "delta": ["--weights.transport", "rdma", "--weights.delta", "--generator.dtype", "bfloat16"],
    "torchstore": ["--weights.transport", "torchstore"],
}


def numbers(run: Run) -> list[dict]:
    """What the run computed at each step, without what it measured of time and of the push."""
    return [
        {name: value for name, value in row.items() if not name.startswith(("timing/", "tokens_per_s", "push/bytes"))}
        for row in run.metrics()
    ]


@pytest.fixture(scope="module")
def over_shared_memory(tmp_path_factory):
    """Runs over shared memory, one for each dtype of the generator."""
    runs = {}
    for dtype in ("float32", "bfloat16"):
        runs[dtype] = Run(*RUN, "--generator.dtype", dtype, folder=tmp_path_factory.mktemp("runs") / dtype)
    assert all(run.wait() == 0 for run in runs.values()), [run.stderr for run in runs.values()]
    return runs


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_run_is_the_same_over_every_transport(name, over_shared_memory, tmp_path):
    run = Run(*RUN, *TRANSPORTS[name], folder=tmp_path / name)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    same = over_shared_memory["bfloat16" if name == "delta" else "float32"]
    assert numbers(run) == numbers(same)
    assert run.json("summary.json")["policy_digest"] == same.json("summary.json")["policy_digest"]
    pushes = [row for row in run.metrics() if row["push/bytes"]]
    assert (name == "delta") == any(row["push/bytes_sent"] < row["push/bytes"] for row in pushes)
    assert (run.folder / "logs" / "push.txt").read_text().startswith(f"transport: {TRANSPORTS[name][1]}\n")
