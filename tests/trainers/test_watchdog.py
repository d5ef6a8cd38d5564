"""Each condition is found, reported once, counted at every step, and handled as configured."""

import json
import math

import pytest

from rl.cli.arguments import read_config
from rl.config import WatchdogConfig
from rl.errors import RunError
from rl.trainers.report import Watchdog
from tests.kit.tables import check_rows

GOOD = {
    "reward/zero_std_groups": 0.5,
    "timing/starved": 0.1,
    "timing/step": 1.0,
    "entropy/mean": 1.0,
    "kl/behaviour": 0.001,
    "logprob/error_mean": 0.001,
    "loss/mean": -0.2,
    "trainer/grad_norm": 0.3,
    "trainer/updates": 1.0,
    "trainer/lr/AdamW": 1e-3,
    "advantage/std": 1.0,
}
LIMITS = {
    "zero_std_steps": 3,
    "starving_share": 0.9,
    "starving_steps": 2,
    "vanished_steps": 2,
    "entropy_min": 0.1,
    "entropy_max": 2.0,
    "drift_max": 0.05,
    "mismatch_max": 0.002,
    "parity": "warn",
}
CASES = [
    ("zero_std", {"reward/zero_std_groups": 1.0}, 3, "reward/zero_std_groups is 1, "),
    (
        "starving",
        {"timing/starved": 0.95},
        2,
        "timing/starved is 95% of the step, above watchdog.starving_share=0.9",
    ),
    (
        "vanished",
        {"trainer/updates": 0.0, "trainer/grad_norm": 0.0},
        2,
        "trainer/grad_norm is 0, so no weight changed, in 2",
    ),
    ("vanished", {"trainer/updates": 0.0}, 2, "trainer/updates is 0: the dtype of the parameters"),
    ("entropy", {"entropy/mean": 0.09}, 1, "entropy/mean is 0.09, below watchdog.entropy_min=0.1"),
    ("entropy", {"entropy/mean": 2.5}, 1, "entropy/mean is 2.5, above watchdog.entropy_max=2.0"),
    (
        "mismatch",
        {"logprob/error_mean": 0.003},
        1,
        "logprob/error_mean is 0.003, above watchdog.mismatch_max=0.002",
    ),
    (
        "parity",
        {"logprob/differing_tokens": 3.0, "logprob/error_max": 0.5},
        1,
        "logprob/differing_tokens is 3, and logprob/error_max 0.5; ",
    ),
    ("drift", {"kl/behaviour": 0.06}, 1, "kl/behaviour is 0.06, above watchdog.drift_max=0.05"),
    ("non_finite", {"loss/mean": math.nan}, 1, "loss/mean is nan"),
    ("non_finite", {"trainer/grad_norm": math.inf}, 1, "trainer/grad_norm is inf"),
]
"""Name of the condition, what a step's metrics then say, steps until the condition is an alarm, and
the beginning of the alarm.
"""
NAMES = {
    *("stalled", "zero_std", "vanished", "starving", "entropy", "drift", "non_finite"),
    *("parity", "mismatch", "reference", "memory"),
}
EXPERTS = "--model.num_experts 4 --model.experts_per_token 2 --model.moe_hidden_dim 64"
ROUNDING = {
    "": 0.001,
    "--rollout.temperature 0.5": 0.002,
    "--rollout.temperature 2": 0.001,
    "--rollout.temperature 2 --rollout.final_temperature 0.5": 0.002,
    "--generator.dtype bfloat16": 0.1,
    "--trainer.training.mixed_precision_param bfloat16": 0.1,
    EXPERTS: 0.1,
    f"{EXPERTS} --trainer.router_replay generator": 0.001,
    f"{EXPERTS} --trainer.router_replay generator --rollout.pipeline asynchronous": 0.1,
    "trainer.float8:linear --trainer.float8.emulate": 0.5,
    "--generator.inflight_policy continue": None,
    "--watchdog.mismatch_max 0": 0.0,
    "--watchdog.mismatch_max 0.3 --rollout.temperature 0.5": 0.3,
}
"""Largest mean difference of log-probs that raises no alarm, by options of the quickstart."""
EACH_CASE = pytest.mark.parametrize(("name", "bad", "steps", "says"), CASES)


def watch(**config) -> Watchdog:
    return Watchdog(WatchdogConfig(**LIMITS | config))


def go(watchdog: Watchdog, first: int, *rows: dict[str, float]) -> list[list[str]]:
    """Return the alarms of each step."""
    return [watchdog.check({"step": first + n, **GOOD, **row}) for n, row in enumerate(rows)]


def counts(watchdog: Watchdog) -> dict[str, float]:
    """Return the counters above 0, by condition."""
    assert set(watchdog.metrics) == {f"watchdog/{name}" for name in NAMES}
    return {
        name.removeprefix("watchdog/"): count for name, count in watchdog.metrics.items() if count
    }


@EACH_CASE
def test_a_warning_is_printed_once_until_its_condition_ends(name, bad, steps, says):
    watchdog = watch(**{name: "warn"})
    told = go(watchdog, 1, *[bad] * (steps + 2), {}, *[bad] * steps)
    [first], [again] = [alarms for alarms in told if alarms]
    assert (told.index([first]), told.index([again])) == (steps - 1, 2 * steps + 2)
    assert first.startswith(f"step {steps}: {name}: {says}")
    assert steps == 1 or first.endswith(
        f", in {steps} steps in a row, watchdog.{name}_steps={steps}"
    )
    assert counts(watchdog) == {name: 4}


@EACH_CASE
def test_a_failure_names_step_condition_value_and_the_field_to_change(name, bad, steps, says):
    watchdog = watch(**{name: "fail"})
    assert not any(go(watchdog, 1, *[bad] * (steps - 1), {}, *[bad] * (steps - 1)))
    said = f"^step {2 * steps}: {name}: {says}.*; set watchdog.{name} to 'warn'"
    with pytest.raises(RunError, match=said):
        go(watchdog, 2 * steps, bad)
    assert counts(watchdog) == {name: 1}


@EACH_CASE
def test_an_ignored_condition_is_counted(name, bad, steps, says):
    watchdog = watch(**{name: "ignore"})
    assert not any(go(watchdog, 1, *[bad] * (steps + 3)))
    assert counts(watchdog) == {name: 4}


def test_memory_that_grows_is_found_once_and_by_the_smallest_so_far():
    watchdog = watch()
    seen = [{"memory/resident": gib} for gib in (6.0, 5.0, 7.0, 7.4, 7.6, 8.0, 7.4)]
    *before, found, again, less = go(watchdog, 1, *seen)
    assert before == [[]] * 4
    says = "memory/resident is 7.6 GiB and was 5.0, a growth above watchdog.memory_growth=0.5"
    assert found == [f"step 5: memory: {says}"]
    assert again == less == []
    assert counts(watchdog) == {"memory": 2}
    small = [{"memory/resident": gib} for gib in (0.5, 1.4)]  # below 1 GiB
    assert go(watch(), 1, *small) == [[], []]
    assert go(watch(memory_growth=0.0), 1, *seen) == [[]] * 7


def test_a_healthy_run_raises_no_alarm():
    watchdog = watch(**dict.fromkeys(NAMES, "fail"))
    assert not any(go(watchdog, 1, *[{}] * 20))
    assert counts(watchdog) == {}


def test_a_reference_that_is_not_the_initial_policy_is_found_in_the_first_step():
    away = {"kl/reference": 0.003}
    said = "step 1: reference: kl/reference is 0.003, above watchdog.mismatch_max=0.002; policy and"
    [[alarm]] = go(watch(), 1, away)
    assert alarm.startswith(said)
    assert go(watch(), 2, away) == go(watch(), 1, {"kl/reference": 0.001}) == [[]]
    assert go(watch(mismatch_max=0.0), 1, away) == [[]]
    with pytest.raises(RunError, match="; set watchdog.reference to 'warn'"):
        go(watch(reference="fail"), 1, away)


def test_a_mismatch_is_more_than_rounding_explains():
    def check(row):
        options, most = row
        _, config = read_config(["--config", "quickstart", *options.split()], program="test")
        assert config.watchdog_limits().mismatch_max == most

    check_rows([*ROUNDING.items()], check)


@pytest.mark.parametrize(
    "reason",
    [{"advantage/std": 0.0}, {"trainer/lr/AdamW": 0.0}],
    ids=["equal advantages", "no learning rate"],
)
def test_a_step_that_has_nothing_to_learn_has_not_vanished(reason):
    watchdog = watch(**dict.fromkeys(NAMES, "fail"))
    idle = {"trainer/updates": 0.0, "trainer/grad_norm": 0.0}
    assert not any(go(watchdog, 1, *[idle | reason] * 20))


def test_unset_limits_and_missing_metrics_raise_no_alarm():
    watchdog = Watchdog(WatchdogConfig(**dict.fromkeys(NAMES, "fail")))
    high = {"entropy/mean": 1e9, "logprob/error_mean": 1e9}
    assert not any(
        go(watchdog, 1, {"entropy/mean": 0.0, "kl/behaviour": 1e9, "kl/reference": 1e9}, high)
    )
    assert [watchdog.check({"step": step}) for step in range(3, 30)] == [[]] * 27
    assert counts(watchdog) == {}


def test_all_conditions_of_a_step_are_counted_and_the_cause_fails_first():
    bad = {name: value for _, row, _, _ in CASES for name, value in row.items()}
    watchdog = watch(zero_std_steps=1, starving_steps=1)
    [told] = go(watchdog, 1, bad)
    order = ["non_finite", "parity", "mismatch", "drift", "entropy", "zero_std", "starving"]
    assert [text.split(": ")[1] for text in told] == order
    failing = watch(zero_std_steps=1, zero_std="fail", non_finite="fail")
    with pytest.raises(RunError, match="step 1: non_finite"):
        go(failing, 1, bad)
    names = ("non_finite", "parity", "mismatch", "drift", "entropy", "zero_std")
    assert counts(failing) == dict.fromkeys(names, 1)


def test_a_stall_is_printed_and_counted_once_until_a_step_ends():
    watchdog = watch(stalled="warn", stalled_s=60.0)
    go(watchdog, 7, {})
    told = [watchdog.stalled(seconds) for seconds in (10.0, 59.9, 60.0, 70.0)]
    alarm = "step 7: stalled: no step was done for 60 s, watchdog.stalled_s=60"
    assert told == [[], [], [alarm], []]
    go(watchdog, 8, {})
    assert [len(watchdog.stalled(seconds)) for seconds in (1.0, 61.0, 62.0)] == [0, 1, 0]
    assert counts(watchdog) == {"stalled": 2}


def test_a_stall_ends_the_run_or_is_only_counted():
    said = r"step 0: stalled: no step was done for 90 s.*set watchdog.stalled to 'warn'"
    with pytest.raises(RunError, match=said):
        watch(stalled="fail", stalled_s=60.0).stalled(90.0)
    silent = watch(stalled="ignore", stalled_s=60.0)
    assert (silent.stalled(90.0), silent.stalled(100.0), counts(silent)) == ([], [], {"stalled": 1})


def test_after_a_resume_counts_and_rows_of_bad_steps_go_on():
    watchdog = watch(drift="ignore")
    flat = {"reward/zero_std_groups": 1.0}
    go(watchdog, 1, {"kl/behaviour": 1.0}, flat, flat)
    state = json.loads(json.dumps(watchdog.to_dict()))
    go(watchdog, 4, flat)
    config = WatchdogConfig(**LIMITS, zero_std="fail")
    resumed = Watchdog(config, state)
    assert counts(resumed) == {"drift": 1}
    with pytest.raises(RunError, match="step 4: zero_std: .* in 3 steps in a row"):
        go(resumed, 4, flat)
    assert counts(Watchdog(config, {})) == {}
