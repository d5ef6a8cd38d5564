"""The weights that arrive do not depend on what carries them (C3)."""

import pytest

from tests.e2e.runs import TINY, Run

RUN = [*TINY, "--steps", "4", "--weights.digests", "--generator.dtype", "bfloat16", "--quiet"]
SLOWLY = ["--trainer.training.max_norm", "1e-8"]  # beside Adam's epsilon: few elements of bfloat16 change in a step
TRANSPORTS = {"rdma": ["--weights.delta"], "torchstore": []}


def numbers(run: Run) -> list[dict]:
    """What the run computed at each step, without what it measured of time and of the push."""
    return [
        {name: value for name, value in row.items() if not name.startswith(("timing/", "tokens_per_s", "push/bytes"))}
        for row in run.metrics()
    ]


@pytest.fixture(scope="module")
def over_shared_memory(tmp_path_factory):
    run = Run(*RUN, *SLOWLY, folder=tmp_path_factory.mktemp("runs") / "shared_memory")
    assert run.wait() == 0, run.stderr
    return run


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_run_is_the_same_over_every_transport(name, over_shared_memory, tmp_path):
    run = Run(*RUN, *SLOWLY, "--weights.transport", name, *TRANSPORTS[name], folder=tmp_path / name)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert numbers(run) == numbers(over_shared_memory)
    assert run.json("summary.json")["policy_digest"] == over_shared_memory.json("summary.json")["policy_digest"]
    less = [row["push/bytes_sent"] < row["push/bytes"] for row in run.metrics()]
    assert less == [False, *[name == "rdma"] * 3], "the first push has no base"
    assert (run.folder / "logs" / "push.txt").read_text().startswith(f"transport: {name}\n")
