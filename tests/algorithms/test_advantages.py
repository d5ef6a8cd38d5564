"""The estimators are the papers' equations, transcribed here in float64, one token at a time."""

import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.algorithms.advantages import (
    GAE,
    GDPO,
    Advantages,
    GroupAdvantage,
    LeaveOneOut,
    MaxRL,
    ReinforcePlusPlus,
    Scored,
    advantages_of,
    overlong_penalty,
)
from rl.errors import RunError


def scored(rewards, *, groups=None, lengths=None, **columns):
    lengths = torch.tensor(lengths or [1] * len(rewards))
    columns = {"token_rewards": torch.zeros(int(lengths.sum())), **columns}
    return Scored(
        rewards=torch.tensor(rewards),
        groups=torch.tensor(groups or [0] * len(rewards)),
        lengths=lengths,
        **columns,
    )


def ragged(seed):
    """Return nine unordered completions of three prompts, with token rewards and values."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (9,), generator=draw).tolist()
    return scored(
        torch.randn(9, generator=draw).tolist(),
        groups=[7, 2, 2, 5, 7, 2, 5, 7, 7],
        lengths=lengths,
        token_rewards=-0.1 * torch.rand(sum(lengths), generator=draw),
        values=torch.randn(sum(lengths), generator=draw),
    )


def completions(given):
    """Return (reward, group, token rewards, values) of each completion, in Python's floats."""
    sizes = given.lengths.tolist()
    columns = [
        [part.tolist() for part in column.split(sizes)]
        for column in (given.token_rewards, given.values)
    ]
    return list(zip(given.rewards.tolist(), given.groups.tolist(), *columns, strict=True))


def others(rows, index):
    """Return the total rewards of the other completions of the same prompt."""
    return [
        r + sum(extra)
        for i, (r, g, extra, _) in enumerate(rows)
        if g == rows[index][1] and i != index
    ]


def grpo(rows, std):
    for index, (reward, _, extra, _) in enumerate(rows):
        own = reward + sum(extra)
        group = [*others(rows, index), own]
        scale = statistics.stdev(group) + 1e-6 if std else 1.0
        yield from [(own - statistics.fmean(group)) / scale] * len(extra)


def rloo(rows):
    for index, (reward, _, extra, _) in enumerate(rows):
        yield from [reward + sum(extra) - statistics.fmean(others(rows, index))] * len(extra)


def whitened(values):
    return [(v - statistics.fmean(values)) / (statistics.pstdev(values) + 1e-8) for v in values]


def reinforce(rows, gamma, baseline):
    earned = []
    for reward, group, extra, _ in rows:
        mean = statistics.fmean(r for r, g, *_ in rows if g == group) if baseline else 0.0
        each = [*extra[:-1], extra[-1] + reward - mean]
        earned += [
            sum(gamma ** (k - t) * each[k] for k in range(t, len(each))) for t in range(len(each))
        ]
    return whitened(earned)


def gae(rows, gamma, lam):
    advantages = []
    for reward, _, extra, values in rows:
        each = [*extra[:-1], extra[-1] + reward]
        after = [*values[1:], 0.0]
        delta = [r + gamma * v1 - v0 for r, v1, v0 in zip(each, after, values, strict=True)]
        advantages += [
            sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta)))
            for t in range(len(delta))
        ]
    return advantages


ESTIMATORS = {
    "GRPO": (GroupAdvantage.Config(), lambda rows: grpo(rows, True)),
    "Dr. GRPO": (GroupAdvantage.Config(normalize_std=False), lambda rows: grpo(rows, False)),
    "RLOO": (LeaveOneOut.Config(), rloo),
    "REINFORCE++": (ReinforcePlusPlus.Config(), lambda rows: reinforce(rows, 1.0, False)),
    "REINFORCE++, discounted": (
        ReinforcePlusPlus.Config(gamma=0.8),
        lambda rows: reinforce(rows, 0.8, False),
    ),
    "REINFORCE++-baseline": (
        ReinforcePlusPlus.Config(baseline="group_mean"),
        lambda rows: reinforce(rows, 1.0, True),
    ),
    "GAE": (GAE.Config(gamma=0.97, lam=0.9, whiten=False), lambda rows: gae(rows, 0.97, 0.9)),
    "GAE, of one step": (GAE.Config(lam=0.0, whiten=False), lambda rows: gae(rows, 1.0, 0.0)),
    "GAE, whitened": (GAE.Config(), lambda rows: whitened(gae(rows, 1.0, 0.95))),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_match_the_papers(name):
    config, paper = ESTIMATORS[name]
    given = ragged(0)
    advantages = config.build()(given).advantages
    assert advantages.dtype == torch.float32
    wanted = torch.tensor(list(paper(completions(given))), dtype=torch.float64)
    torch.testing.assert_close(advantages.double(), wanted, rtol=1e-6, atol=1e-7)


def test_maxrl_divides_by_the_mean_reward_of_the_group():
    def maxrl(rows):
        for index, (reward, _, extra, _) in enumerate(rows):
            own = reward + sum(extra)
            mean = statistics.fmean([*others(rows, index), own])
            yield from [(own - mean) / mean if mean else 0.0] * len(extra)

    given = replace(ragged(0), token_rewards=torch.zeros(len(ragged(0).sequence)))
    given = replace(given, rewards=torch.tensor([0.0, 1, 0, 0, 1, 0.5, 0, 0, 0]))
    wanted = torch.tensor(list(maxrl(completions(given))), dtype=torch.float64)
    assert wanted.max() > 1.5 and (wanted == 0).any()  # a group whose rewards are all 0
    found = MaxRL.Config().build()(given).advantages
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-7)
    with pytest.raises(RunError, match="a reward is -1; MaxRL needs rewards of at least 0"):
        MaxRL.Config().build()(scored([1.0, -1.0]))


@pytest.mark.parametrize("rewards", [{}, {"reward": 0.5, "right": 2.0, "short": -1.0}])
def test_gdpo_normalizes_each_reward_in_its_group_and_whitens_the_sum(rewards):
    def gdpo(rows, metrics, weights):
        """Return the advantages of GDPO of the reward and of ``metrics``, a list by name."""
        sums = [0.0] * len(rows)
        for name, weight in weights.items():
            own = [r + sum(extra) for r, _, extra, _ in rows] if name == "reward" else metrics[name]
            for index, (_, group, _, _) in enumerate(rows):
                mine = [v for v, (_, g, _, _) in zip(own, rows, strict=True) if g == group]
                apart = own[index] - statistics.fmean(mine)
                sums[index] += weight * apart / (statistics.stdev(mine) + 1e-6)
        for (_, _, extra, _), value in zip(rows, whitened(sums), strict=True):
            yield from [value] * len(extra)

    metrics = {"right": [0, 1, 0, 1, 1, 0, 0, 0, 1], "short": [3, 1, 4, 1, 5, 9, 2, 6, 5]}
    columns = {name: torch.tensor(each).double() for name, each in metrics.items()}
    given = replace(ragged(0), metrics=columns)
    config = GDPO.Config(rewards=rewards)
    wanted = [*gdpo(completions(given), metrics, rewards or {"reward": 1.0})]
    torch.testing.assert_close(
        config.build()(given).advantages.double(),
        torch.tensor(wanted).double(),
        rtol=1e-6,
        atol=1e-6,
    )
    assert config.metrics == (("right", "short") if rewards else ())


def test_returns_are_advantages_plus_values_before_whitening():
    given = ragged(0)
    wanted = torch.tensor(gae(completions(given), 1.0, 0.95), dtype=torch.float64) + given.values
    for whiten in (True, False):
        returns = GAE.Config(whiten=whiten).build()(given).returns
        torch.testing.assert_close(returns.double(), wanted, rtol=1e-6, atol=1e-6)
    assert GroupAdvantage.Config().build()(given).returns is None


@pytest.mark.parametrize(
    "config", [GroupAdvantage.Config(), GroupAdvantage.Config(normalize_std=False)]
)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.7e5])
@pytest.mark.parametrize("samples", [1, 3, 7, 8])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_0(config, reward, samples):
    """This holds even if the float32 mean of equal numbers differs from that number."""
    given = scored([reward] * samples + [0.0] * samples, groups=[0] * samples + [1] * samples)
    assert config.build()(given).advantages.tolist() == [0.0] * samples * 2


@given(st.integers(1, 40), st.floats(0.5, 1.0))
def test_last_reward_reaches_the_first_token_at_any_length(length, gamma):
    given = scored([1.0, 5.0], lengths=[length, 3], values=torch.zeros(length + 3))
    advantages = GAE.Config(gamma=gamma, lam=1.0, whiten=False).build()(given).advantages
    wanted = [gamma ** (length - 1 - t) for t in range(length)]
    assert advantages[:length].tolist() == pytest.approx(wanted, rel=1e-6)


def test_a_completion_without_tokens_does_not_affect_its_neighbours():
    given = scored([1.0, 9.0, 2.0], lengths=[2, 0, 1], values=torch.zeros(3))
    assert GAE.Config(lam=1.0, whiten=False).build()(given).advantages.tolist() == [1.0, 1.0, 2.0]


def test_missing_inputs_of_an_estimator_are_named():
    with pytest.raises(RunError, match="at least two"):
        LeaveOneOut.Config().build()(scored([1.0, 2.0, 3.0], groups=[0, 0, 1]))
    with pytest.raises(RunError, match="values of a critic"):
        GAE.Config().build()(scored([1.0]))


def test_overlong_penalty_falls_linearly_before_the_limit():
    """DAPO eq. 13 with a limit of 20 and a buffer of 4."""
    lengths = torch.tensor([1, 16, 17, 18, 20, 25])
    wanted = [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, max_tokens=20, buffer=4).tolist() == wanted


def zeros(*shape, **options):
    return Advantages(torch.zeros(*shape, **options))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned None; expected Advantages"),
        (torch.zeros(3), r"returned tensor\(\[0., 0., 0.\]\); expected Advantages"),
        (Advantages([0.0]), r"\(advantages\) returned \[0.0\]; expected a tensor, float32 \[3\]"),
        (zeros(2), r"\(advantages\) returned float32 \[2\] on cpu"),
        (zeros(3, 1), r"\(advantages\) returned float32 \[3, 1\] on cpu"),
        (zeros(3, dtype=torch.float64), r"\(advantages\) returned float64 \[3\] on cpu"),
        (zeros(3, dtype=torch.int64), r"\(advantages\) returned int64 \[3\] on cpu"),
        (zeros(3, device="meta"), r"\(advantages\) returned float32 \[3\] on meta"),
        (zeros(3, requires_grad=True), r"returned float32 \[3\] on cpu with gradient"),
        (zeros(3), r"\(returns\) returned None; expected a tensor"),
        (Advantages(torch.zeros(3), torch.zeros(4)), r"\(returns\) returned float32 \[4\] on cpu"),
        (SystemExit(3), "raised SystemExit: 3\nTraceback"),
        (ZeroDivisionError("none"), "raised ZeroDivisionError: none\nTraceback"),
    ],
)
def test_an_estimator_with_an_invalid_result_is_named(answer, message):
    class Given(GroupAdvantage):
        def __call__(self, scored):
            if isinstance(answer, BaseException):
                raise answer
            return answer

    given = scored([0.0, 1.0], lengths=[1, 2])
    with pytest.raises(RunError, match=f"(?s)^algorithm.advantage: Given.*{message}"):
        advantages_of(Given(GroupAdvantage.Config()), given, with_returns=True)
