"""Verdicts on numbers of a GPU that no test here has."""

import math

import pytest

from scripts.gpu_check import verdicts
from scripts.gpu_check.verdicts import Verdict

MEMORY = {"generator": 32.0, "trainer": 9.0}
GRPO = [{"step": step, "logprob/error_max": 0.02, "reward/mean": 0.1} for step in (1, 2, 3)]

FAILING: list[tuple[Verdict, str]] = [
    (
        verdicts.of_parity([1e-6, 0.01], "float32", []),
        "differ by up to 0.01 and on average by 0.005; float32 explains 0.001 and 0.0001",
    ),
    (
        verdicts.of_parity([0.2, 0.2], "bfloat16", []),
        "on average by 0.2; bfloat16 explains 0.5 and 0.05",
    ),
    (verdicts.of_parity([math.nan, 0.0], "bfloat16", []), "nan"),
    (verdicts.of_parity([0.0], "bfloat16", ["norm 1: differs by 0.1"]), "norm 1: differs by 0.1"),
    (
        verdicts.of_push(["norm.weight", "lm_head.weight"], [1.0], 1e9),
        "2 of the generator's parameters differ from the trainer's; the first is norm.weight",
    ),
    (
        verdicts.of_memory({"idle": 0.5, "generator": 33.0, "trainer": 42.0}, MEMORY),
        "42.0 GiB are used while the trainer alone has the GPU, and 13.5 are explained: the gen",
    ),
    (
        verdicts.of_memory({"idle": 0.5, "generator": 43.0, "trainer": 11.0}, MEMORY),
        "43.0 GiB are used while the generator alone has the GPU, and 36.5 are explained: the t",
    ),
    (
        verdicts.of_changed_weights(3.0, [0.1, 2.5]),
        "log-probs differ by 2.5 after a push that moved them by 3: the graphs compute with other",
    ),
    (verdicts.of_changed_weights(0.05, [0.01]), "moved log-probs by 0.05 only, so that nothing"),
    (
        verdicts.of_step([0.1, 0.01], 1e-4, "float32", None, True),
        "log-probs differ by up to 0.1 from the CPU; 0.001 is allowed",
    ),
    (
        verdicts.of_step([0.1], 0.2, "bfloat16", None, True),
        "the gradient differs by 0.2 of its norm; 0.1 is allowed",
    ),
    (
        verdicts.of_step([0.0], 0.0, "float32", [0.01], True),
        "log-probs differ by up to 0.01 from transformers in float64",
    ),
    (verdicts.of_step([math.nan], 0.0, "coarse", None, True), "nan"),
    (
        verdicts.of_step([0.0], 0.0, "float32", None, False),
        "the digests of the weights are others on the device than on the host",
    ),
    (
        verdicts.of_run([GRPO[0], GRPO[2]], 3, "bfloat16"),
        "metrics.jsonl has the steps [1, 3]; they should be 1 to 3, once each",
    ),
    (
        verdicts.of_run([*GRPO[:2], GRPO[2] | {"reward/mean": math.nan}], 3, "bfloat16"),
        "reward/mean became NaN",
    ),
    (
        verdicts.of_run([*GRPO[:2], GRPO[2] | {"logprob/error_max": 0.7}], 3, "bfloat16"),
        "log-probs of generator and trainer differ by 0.7 in the run",
    ),
]
PASSING: list[tuple[Verdict, str]] = [
    (verdicts.of_parity([0.02, 0.01], "bfloat16", []), "max |Δ| 2.0e-02, mean 1.5e-02 over 2 tok"),
    (verdicts.of_push([], [0.5, 0.25], 1e9), "2 pushes of 1 GB, 0.25 s with digests"),
    (
        verdicts.of_memory({"idle": 0.5, "generator": 35.0, "trainer": 11.0}, MEMORY),
        "GiB used: idle 0.5, generator 35.0, trainer 11.0",
    ),
    (verdicts.of_changed_weights(3.0, [0.1]), "moved log-probs by 3.0e+00"),
    (
        verdicts.of_step([1e-5], 1e-6, "float32", [1e-5], True),
        "max |Δ| 1.0e-05 from the CPU, gradient 1.0e-06",
    ),
    (verdicts.of_run(GRPO, 3, "bfloat16"), "reward 0.1"),
]


@pytest.mark.parametrize(("verdict", "text"), FAILING)
def test_a_verdict_says_what_is_wrong(verdict, text):
    assert verdict.state == "FAIL"
    assert text in verdict.wrong
    assert verdict.numbers


@pytest.mark.parametrize(("verdict", "text"), PASSING)
def test_a_verdict_has_the_figures(verdict, text):
    assert (verdict.state, verdict.wrong) == ("ok", "")
    assert text in verdict.said
    assert verdict.numbers


def test_used_memory_is_read_from_nvidia_smi():
    assert verdicts.used_memory("40960\n1024\n") == 40.0
    with pytest.raises(ValueError, match="nvidia-smi answered 'No devices were found'"):
        verdicts.used_memory("No devices were found\n")
