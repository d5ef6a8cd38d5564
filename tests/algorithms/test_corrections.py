"""Corrections are ratios of probabilities, written out here token by token."""

import math

import pytest
import torch

from rl.algorithms.corrections import MaskedIS, StalenessDecay, TruncatedIS, correction_weights
from rl.errors import RunError

LENGTHS = [3, 1, 5, 4]
SEQUENCE = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))


def batch(seed):
    """Return (proximal, behaviour, staleness, sequence), ratios inside and outside all ranges."""
    draw = torch.Generator().manual_seed(seed)
    behaviour = -torch.rand(sum(LENGTHS), generator=draw) * 3
    proximal = behaviour + torch.randn(sum(LENGTHS), generator=draw)
    staleness = torch.randint(0, 4, (sum(LENGTHS),), generator=draw).float()
    return proximal, behaviour, staleness, SEQUENCE


def ratios(columns):
    """Return the ratios of each sequence's tokens, as Python's floats."""
    apart = (columns[0].double() - columns[1].double()).exp()
    return [part.tolist() for part in apart.split(LENGTHS)]


def masked(ratio, weight):
    return weight if 0.5 <= ratio <= 2.0 else 0.0


def geometric(each):
    return math.prod(each) ** (1 / len(each))


WRITTEN_OUT = {
    "truncated": (TruncatedIS.Config(), lambda each: [min(r, 2.0) for r in each]),
    "truncated sequences": (
        TruncatedIS.Config(level="sequence", cap=1.5),
        lambda each: [min(math.prod(each), 1.5)] * len(each),
    ),
    "masked": (MaskedIS.Config(), lambda each: [masked(r, r) for r in each]),
    "masked in a narrow range": (
        MaskedIS.Config(low=0.7, high=1.3),
        lambda each: [r if 0.7 <= r <= 1.3 else 0.0 for r in each],
    ),
    "masked, unweighted": (MaskedIS.Config(weigh=False), lambda each: [masked(r, 1) for r in each]),
    "masked sequences": (
        MaskedIS.Config(level="sequence"),
        lambda each: [masked(geometric(each), geometric(each))] * len(each),
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_weights_follow_from_the_ratios(name, seed):
    config, weight = WRITTEN_OUT[name]
    columns = batch(seed)
    weights, _ = config.build()(*columns)
    wanted = [value for each in ratios(columns) for value in weight(each)]
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(wanted, rel=1e-5)
    assert len({round(value, 6) for value in wanted}) > 1


def test_corrections_multiply_and_report_masked_and_capped_shares():
    columns = batch(0)
    configs = (TruncatedIS.Config(), MaskedIS.Config(weigh=False), StalenessDecay.Config())
    weights, metrics = correction_weights([config.build() for config in configs], *columns)
    each = [r for sequence in ratios(columns) for r in sequence]
    wanted = [
        masked(r, min(r, 2.0)) * 0.9**age for r, age in zip(each, columns[2].tolist(), strict=True)
    ]
    assert weights.tolist() == pytest.approx(wanted, rel=1e-5)
    assert metrics == {
        "correction/mean": pytest.approx(sum(wanted) / len(wanted), rel=1e-5),
        "correction/masked": pytest.approx(wanted.count(0.0) / len(wanted)),
        "correction/capped": pytest.approx(sum(r > 2.0 for r in each) / len(each)),
    }
    assert 0 < metrics["correction/masked"] < 1 and 0 < metrics["correction/capped"] < 1


def test_the_same_policy_without_staleness_has_weights_of_1():
    _, behaviour, staleness, sequence = batch(0)
    configs = [*(config for config, _ in WRITTEN_OUT.values()), StalenessDecay.Config()]
    corrections = [config.build() for config in configs]
    columns = (behaviour, behaviour, staleness * 0, sequence)
    weights, metrics = correction_weights(corrections, *columns)
    assert weights.unique().tolist() == [1.0]
    assert metrics == {"correction/mean": 1.0, "correction/masked": 0.0, "correction/capped": 0.0}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_ratios_beyond_float32_are_capped_or_masked(name):
    apart = torch.tensor([500.0, -500.0, 0.0, 400.0])
    columns = apart, torch.zeros(4), torch.zeros(4), torch.tensor([0, 1, 2, 3])
    weights, _ = WRITTEN_OUT[name][0].build()(*columns)
    assert weights.isfinite().all() and weights.max() <= 2.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned None; expected are a tensor and a dict of metrics"),
        (torch.ones(13), r"returned tensor\(.*; expected are a tensor and a dict"),
        ((torch.ones(13), None), "expected are a tensor and a dict of metrics"),
        (
            (torch.ones(12), {}),
            r"returned float32 \[12\] on cpu; expected a tensor",
        ),
        ((torch.ones(13).double(), {}), r"returned float64 \[13\] on cpu; expected"),
        (
            (torch.ones(13), {"share": "all"}),
            "its metrics {'share': 'all'} raised ValueError",
        ),
        (SystemExit(3), "raised SystemExit: 3"),
    ],
)
def test_a_correction_with_an_invalid_result_is_named(answer, message):
    class Given(TruncatedIS):
        def __call__(self, *columns):
            if isinstance(answer, BaseException):
                raise answer
            return answer

    with pytest.raises(RunError, match=f"(?s)^algorithm.corrections: Given.*{message}"):
        correction_weights([Given(TruncatedIS.Config())], *batch(0))


def test_metrics_of_a_correction_become_plain_numbers():
    class Given(TruncatedIS):
        def __call__(self, *columns):
            return torch.ones(13), {"share": torch.tensor(0.5)}

    assert correction_weights([Given(TruncatedIS.Config())], *batch(0))[1]["share"] == 0.5
