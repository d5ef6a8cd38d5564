"""The weights that arrive do not depend on what carries them (C3)."""

import pytest

from rl.weights.transport import NETWORKS
from tests.kit.runs import TINY, Run, digest, numbers

RUN = (*TINY, "--steps", "4", "--weights.digests", "--generator.dtype", "bfloat16", "--quiet")
SLOWLY = (
    "--trainer.training.max_norm",
    "1e-8",
)  # beside Adam's epsilon: few elements of bfloat16 change in a step


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_a_run_is_the_same_over_every_transport(name, finished, tmp_path):
    sends_deltas = name != "torchstore"
    delta = "--weights.delta" if sends_deltas else "--weights.no-delta"
    run = Run(*RUN, *SLOWLY, "--weights.transport", name, delta, folder=tmp_path / name)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    over_shared_memory = finished(*RUN, *SLOWLY)
    assert numbers(run, "push/bytes") == numbers(over_shared_memory, "push/bytes")
    assert digest(run) == digest(over_shared_memory)
    less = [row["push/bytes_sent"] < row["push/bytes"] for row in run.metrics()]
    assert less == [False, *[sends_deltas] * 3], "the first push has no base"
    assert (run.folder / "logs" / "push.txt").read_text().startswith(f"transport: {name}\n")
