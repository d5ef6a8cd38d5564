"""A run with ``parity`` bitwise trains on exactly the log-probs that were sampled."""

import pytest

from tests.kit.runs import TINY


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_has_log_probs_without_an_error(dtype, finished):
    dtypes = ("--trainer.training.mixed_precision_param", dtype, "--generator.dtype", dtype)
    exact = ("--parity", "bitwise", "--watchdog.parity", "fail", "--rollout.temperature", "0.8")
    exact += ("--rollout.final_temperature", "1.2")
    rows = finished(*TINY, *dtypes, *exact).metrics()
    assert {row["logprob/error_max"] for row in rows} == {0.0}
    assert {row["logprob/differing_tokens"] for row in rows} == {0.0}
    assert {row["ratio/max"] for row in rows} == {1.0}
