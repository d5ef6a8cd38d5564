"""Credit of the turns of an episode, transcribed in float64, one turn at a time."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from rl.algorithms.advantages import GAE, GroupAdvantage, LeaveOneOut, ReinforcePlusPlus, Scored
from rl.algorithms.batch import counts_of, make_batch, turn_ends, turn_rewards
from rl.cli.arguments import find_config
from rl.errors import RunError
from rl.rollout.rollouter import Episode
from rl.trainers.trial import build_algorithm
from rl.types import Batch, Completion, EpisodeEnd, EpisodeTurn, Prompt, Rollout, Sequence


def sequence(draws, turns):
    """Return fed and sampled tokens of ``turns`` answers, each of one to four tokens."""
    sampled = []
    for _ in range(turns):
        sampled += [False] * draws.randint(1, 3) + [True] * draws.randint(1, 4)
    mask = np.array(sampled)
    tokens = np.arange(len(mask), dtype=np.int32)
    logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Sequence(tokens=tokens, sampled=mask, logprobs=logprobs, versions=versions)


def episodes(seed):
    """Return two groups of three episodes, of one to four turns in one or two sequences."""
    draws = random.Random(seed)
    made = []
    for number in range(6):
        parts = tuple(sequence(draws, draws.randint(1, 2)) for _ in range(1 + number % 2))
        turns = sum(len(lengths_of(part)) for part in parts)
        rewards = tuple(draws.uniform(-1, 1) for _ in range(turns))
        prompt = Prompt(prompt_id=number // 3, tokens=[], text="", answer="")
        ended = {"text": "", "stop_reason": "done", "reward": sum(rewards)}
        own = {"sample": number % 3, "sequences": parts, "turn_rewards": rewards}
        made.append(Rollout(prompt=prompt, **own, **ended))
    return made


def lengths_of(part):
    """Return the length of each run of sampled tokens, counted one token at a time."""
    lengths = []
    before = False
    for now in part.sampled.tolist():
        if now and not before:
            lengths.append(0)
        if now:
            lengths[-1] += 1
        before = now
    return lengths


def scored(rollouts, seed, *, by_turn=True):
    draw = torch.Generator().manual_seed(seed)
    lengths = counts_of(rollouts)
    count = int(lengths.sum())
    return Scored(
        rewards=torch.tensor([rollout.reward for rollout in rollouts]),
        groups=torch.tensor([rollout.prompt.prompt_id for rollout in rollouts]),
        lengths=lengths,
        token_rewards=-0.1 * torch.rand(count, generator=draw),
        values=torch.randn(count, generator=draw),
        turn_rewards=turn_rewards(rollouts) if by_turn else None,
        turn_ends=turn_ends(rollouts),
    )


def each_turn(rollouts, given):
    """Yield, by rollout, its turns: lists of (reward, value) of each token, in Python's floats."""
    place = 0
    for rollout in rollouts:
        turns = []
        lengths = [length for part in rollout.sequences for length in lengths_of(part)]
        for length, reward in zip(lengths, rollout.turn_rewards, strict=True):
            rewards = given.token_rewards[place : place + length].tolist()
            if given.turn_rewards is not None:
                rewards[-1] += reward
            values = given.values[place : place + length].tolist()
            turns.append([*zip(rewards, values, strict=True)])
            place += length
        if given.turn_rewards is None:
            last, value = turns[-1][-1]
            turns[-1][-1] = (last + rollout.reward, value)
        yield turns


def gae_by_turn(turns, gamma, lam):
    """Return advantages: rewards of an answer are summed; gamma and lambda act between answers."""
    advantages = []
    following = 0.0  # the critic's value at the begin of the next turn
    after = 0.0  # the advantage there
    for turn in reversed(turns):
        own = [
            sum(reward for reward, _ in turn[place:]) + gamma * following - value
            for place, (_, value) in enumerate(turn)
        ]
        own = [each + gamma * lam * after for each in own]
        following = turn[0][1]
        after = own[0]
        advantages = own + advantages
    return advantages


def gae_by_token(turns, gamma, lam):
    tokens = [token for turn in turns for token in turn]
    advantages = []
    following = after = 0.0
    for reward, value in reversed(tokens):
        after = reward + gamma * following - value + gamma * lam * after
        following = value
        advantages.insert(0, after)
    return advantages


FORMULAS = {"turn": gae_by_turn, "token": gae_by_token}


@pytest.mark.parametrize("by_turn", [True, False], ids=["turn", "episode"])
@pytest.mark.parametrize("unit", FORMULAS)
@pytest.mark.parametrize("seed", range(3))
def test_gae_over_turns_is_the_formula(unit, by_turn, seed):
    rollouts = episodes(seed)
    given = scored(rollouts, seed, by_turn=by_turn)
    config = GAE.Config(gamma=0.9, lam=0.8, whiten=False, discount_per=unit)
    found = config.build()(given)
    rows = [FORMULAS[unit](turns, 0.9, 0.8) for turns in each_turn(rollouts, given)]
    wanted = torch.tensor([each for row in rows for each in row], dtype=torch.float64)
    torch.testing.assert_close(found.advantages.double(), wanted, rtol=1e-5, atol=1e-6)
    targets = wanted + given.values
    torch.testing.assert_close(found.returns.double(), targets, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("unit", FORMULAS)
def test_reinforce_discounts_per_token_or_per_turn(unit):
    rollouts = episodes(0)
    given = scored(rollouts, 0)
    found = ReinforcePlusPlus.Config(gamma=0.7, discount_per=unit).build()(given).advantages
    earned = []
    for turns in each_turn(rollouts, given):
        for index, turn in enumerate(turns):
            for place in range(len(turn)):
                total = 0.0
                tokens = 0
                for later in range(index, len(turns)):
                    for reward, _ in turns[later][place if later == index else 0 :]:
                        total += 0.7 ** (tokens if unit == "token" else later - index) * reward
                        tokens += 1
                earned.append(total)
    values = torch.tensor(earned, dtype=torch.float64)
    wanted = (values - values.mean()) / (values.std(correction=0) + 1e-8)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [GroupAdvantage.Config(), LeaveOneOut.Config()])
def test_group_advantages_compare_whole_episodes(config):
    """A forked episode counts once, and the place of its reward makes no difference."""
    rollouts = episodes(1)
    by_turn, whole = (
        config.build()(scored(rollouts, 1, by_turn=by_turn)).advantages for by_turn in (True, False)
    )
    assert torch.equal(by_turn, whole)


def test_the_last_token_of_a_turn_has_its_reward_and_the_last_of_all_the_rest():
    rollouts = episodes(2)
    given = dataclasses.replace(
        scored(rollouts, 2), token_rewards=torch.zeros(int(counts_of(rollouts).sum()))
    )
    more = dataclasses.replace(given, rewards=given.rewards + 5.0)  # of a reward model
    place = 0
    for rollout in rollouts:
        lengths = [length for part in rollout.sequences for length in lengths_of(part)]
        for number, length in enumerate(lengths):
            place += length
            rest = 5.0 if number + 1 == len(lengths) else 0.0
            earned = rollout.turn_rewards[number]
            assert float(given.earned[place - 1]) == pytest.approx(earned, abs=1e-6)
            assert float(more.earned[place - 1]) == pytest.approx(earned + rest, abs=1e-6)
    assert int((given.earned.abs() > 1e-6).sum()) == sum(len(r.turn_rewards) for r in rollouts)


def test_rewards_of_turns_are_none_or_one_for_each_turn():
    rollout = dataclasses.replace(episodes(0)[0], turn_rewards=())
    assert not turn_rewards([rollout]).any()
    rollout = dataclasses.replace(rollout, turn_rewards=(1.0,) * 9)
    with pytest.raises(RunError, match="rollout 0 of prompt 0 has 9 rewards of turns, but"):
        turn_rewards([rollout])


def test_minibatches_hold_whole_groups():
    """A group shares the computation of its prompt, whose cells a cut would compute again."""
    config = find_config("quickstart")()
    config.rollout.prompts_per_step, config.rollout.samples_per_prompt = 6, 4
    config.algorithm.prompts_per_minibatch = 2
    config.algorithm.update_epochs = 2
    algorithm = build_algorithm(config)
    prompts = torch.arange(6).repeat_interleave(4)
    batch = Batch(
        tokens=prompts.repeat_interleave(3),
        lengths=torch.full((24,), 3),
        loss_weights=torch.ones(72),
    )
    epochs = [[], []]
    for number, part in enumerate(algorithm.minibatches(batch, step=1)):
        first, second = part.tokens[::3].unique(return_counts=True)
        assert second.tolist() == [4, 4]
        epochs[number // 3] += first.tolist()
    assert [sorted(seen) for seen in epochs] == [[*range(6)]] * 2
    assert epochs[0] != epochs[1]
    uneven = algorithm.minibatches(batch.select([*range(23)]), step=1)
    assert sorted(len(part) for part in uneven) == [7, 7, 8, 8, 8, 8]


def test_minibatches_and_fixed_length_count_rollouts():
    """Sequences of one rollout are trained in one update, which divides by rollouts."""
    config = find_config("quickstart")()
    rollouts = episodes(3) + episodes(4)
    config.rollout.prompts_per_step = 4
    config.algorithm.prompts_per_minibatch = 1
    config.algorithm.loss.reduction = "fixed_length"
    algorithm = build_algorithm(config)
    batch = make_batch(rollouts, reduction="fixed_length", max_tokens=10)
    owners = [n for n, rollout in enumerate(rollouts) for _ in rollout.sequences]
    batch.columns["owner"] = torch.tensor(owners).repeat_interleave(batch.lengths).float()
    parts = algorithm.minibatches(batch, step=1)
    assert len(parts) == 4
    seen = []
    for part in parts:
        inside = set(part.columns["owner"].int().tolist())
        assert len(part.rows_by_rollout) == len(inside) == 3
        assert float(part.denominators.sum()) == pytest.approx(3.0)
        seen += inside
        wanted = sum(rollouts[each].sampled_count for each in inside) / 10
        assert float(part.loss_weights.sum()) == pytest.approx(wanted)
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize("in_time", [True, False])
@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_the_reward_of_a_turn_is_credited_if_the_config_says_so(credit, in_time):
    """A turn gets the rewards that follow it in time, in whichever sequence it is."""
    draws = random.Random(6)
    rollouts = episodes(5)
    if not in_time:
        rollouts = [
            dataclasses.replace(each, turn_order=tuple(draws.sample(range(n), n)))
            for each, n in zip(rollouts, map(len, (r.turns for r in rollouts)), strict=True)
        ]
    config = find_config("quickstart")()
    config.algorithm.credit = credit
    config.algorithm.advantage = GAE.Config(lam=1.0, whiten=False)
    algorithm = build_algorithm(config)
    batch = make_batch(rollouts)
    batch.columns["old_values"] = torch.zeros(len(batch.tokens))
    algorithm.score(batch, rollouts, torch.tensor([rollout.reward for rollout in rollouts]))
    found = batch.columns["returns"][batch.loss_mask].split(counts_of(rollouts).tolist())
    for rollout, returns in zip(rollouts, found, strict=True):
        lengths = torch.tensor(rollout.turns)
        order = rollout.turn_order or tuple(range(len(lengths)))
        rewards = [*zip(order, rollout.turn_rewards, strict=True)]
        left = torch.tensor([sum(reward for n, reward in rewards if n >= own) for own in order])
        each = left if credit == "turn" else torch.full_like(left, rollout.reward)
        wanted = each.repeat_interleave(lengths)
        torch.testing.assert_close(returns, wanted, rtol=1e-5, atol=1e-5)


def test_answers_of_a_rewritten_history_keep_their_rewards():
    """The second answer begins a new sequence, and the third continues the first one at once."""
    prompt = Prompt(prompt_id=0, tokens=[], text="", answer="")
    episode = Episode(0, None, prompt, 0)
    given = [[1, 2], [7], [1, 2, 3, 3]]
    for tokens, length in zip(given, (2, 3, 1), strict=True):
        episode.feed(EpisodeTurn(tokens=tokens, is_whole=True))
        episode.answer(completion(length))
    end = EpisodeEnd(
        text="", reward=6.0, correct=True, metrics={}, stop_reason="done", turn_rewards=(1, 2, 3)
    )
    episode.feed(EpisodeTurn(tokens=[], end=end))
    rollout = episode.rollout()
    assert [len(each) for each in rollout.sequences] == [5, 4]
    assert rollout.turns == [2, 1, 3]
    assert rollout.turn_rewards == (1, 3, 2)
    assert turn_rewards([rollout]).tolist() == [0, 1, 3, 0, 0, 2]


def completion(length):
    return Completion(
        tokens=[3] * length, logprobs=[-1.0] * length, versions=[0] * length, finish_reason="stop"
    )


REVERSED = "reversed array"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, list, REVERSED])
def test_advantages_of_any_numbers_become_float32(dtype):
    rollouts = episodes(3)
    given = torch.arange(len(rollouts))
    if dtype is REVERSED:
        numbers = given.flip(0).numpy()[::-1]
    else:
        numbers = given.tolist() if dtype is list else given.to(dtype)
    batch = make_batch(rollouts, numbers)
    found = batch.columns["advantages"]
    assert found.dtype == torch.float32
    assert found[batch.loss_mask].tolist() == given.repeat_interleave(counts_of(rollouts)).tolist()


@pytest.mark.parametrize(
    ("advantages", "said"),
    [
        ([1.0], r"have the shape \[1\]; they must have one number for each rollout, \[6\], or"),
        ([[1.0]] * 6, r"have the shape \[6, 1\]"),
        (1.0, r"have the shape \[\]"),
        ([0.0, float("nan")] * 3, r"advantages.1 is nan; advantages must be finite"),
        ([float("inf")] * 6, r"advantages.0 is inf"),
        (["good"] * 6, "they must be numbers"),
        ([[1.0], [2.0, 3.0]], "they must be numbers"),
        ([10**400] * 6, "they must be numbers"),
    ],
)
def test_advantages_that_do_not_belong_to_the_rollouts_are_refused(advantages, said):
    with pytest.raises(RunError, match=said):
        make_batch(episodes(3), advantages)
