"""Players of a game have conversations of their own, and each is credited with its own rewards."""

import asyncio
from dataclasses import dataclass

import pytest
import torch

from rl.algorithms.advantages import GAE, GroupAdvantage
from rl.algorithms.batch import by_player, counts_of, make_batch
from rl.cli.arguments import find_config
from rl.environments.protocol import EnvironmentTask
from rl.environments.self_play import Move, SelfPlay
from rl.errors import ConfigError, GroupLost
from rl.rollout.episodes import Environments
from rl.rollout.rollouter import Episode
from rl.tasks.guessing_game import GuessingGame
from rl.trainers.trial import build_algorithm
from rl.types import Completion
from rl.validation import validate
from tests.kit.numbered_prompts import NumberedPrompts


class Higher(SelfPlay):
    """Each of two players writes two numbers in turn. The higher sum wins 1 from the other."""

    first = 0

    def start(self):
        self.sums = [0, 0]
        self.answers = 0
        return Move(player=self.first, message="Write a number.")

    def opening(self, player):
        return [{"role": "system", "content": f"You are player {player}."}]

    def move(self, player, message):
        self.sums[player] += int(message["content"])
        self.answers += 1
        if self.answers < 4:
            bonus = {player: 0.5} if self.sums[player] >= 7 else {}
            return Move(player=1 - player, message=f"{self.sums}", rewards=bonus)
        won = float(self.sums[0] - self.sums[1])
        return Move(rewards={0: won, 1: -won}, done=True, correct=won > 0)


class HigherTask(NumberedPrompts, EnvironmentTask):
    @dataclass(kw_only=True, slots=True)
    class Config(EnvironmentTask.Config):
        pass

    game = Higher

    def environment(self, prompt, sample):
        return self.game(self.dialect, enable_thinking=False)


@pytest.fixture(scope="module")
def task(model):
    return HigherTask.Config().build(seed=0, model=model)


def play(task, numbers, sample=0):
    """Return the rollout of a game in which the players write ``numbers`` in turn."""

    async def played():
        episode = Episode(0, Environments(task), task.prompt(3), sample)
        episode.feed(await episode.open())
        for number in numbers:
            tokens = task.tokenizer.encode(str(number), add_special_tokens=False)
            episode.answer(Completion.written([*tokens, task.stop_token_ids[0]]))
            episode.feed(await episode.step())
        return episode.rollout()

    return asyncio.run(played())


def test_each_player_has_one_conversation_with_its_own_answers(task):
    rollout = play(task, [1, 2, 4, 3])
    texts = [task.tokenizer.decode(each.tokens) for each in rollout.sequences]
    assert len(texts) == 2
    for player, (text, own, other) in enumerate(zip(texts, "12", "21", strict=True)):
        head = f"<|im_start|>system\nYou are player {player}.<|im_end|>\n<|im_start|>user\n"
        assert text.startswith(head)
        assert f"assistant\n<think>\n\n</think>\n\n{own}<|im_end|>" in text
        assert f"\n\n{other}<|im_end|>" not in text
    sampled = [task.tokenizer.decode(each.tokens[each.sampled]) for each in rollout.sequences]
    assert sampled == ["1<|im_end|>4<|im_end|>", "2<|im_end|>3<|im_end|>"]
    assert rollout.turn_order == (0, 2, 1, 3)


def test_a_reward_goes_to_the_last_answer_of_its_player(task):
    rollout = play(task, [1, 2, 4, 3])
    assert rollout.turn_rewards == (0.0, 0.0, 0.0, 0.0)
    rollout = play(task, [9, 2, 4, 3])
    assert rollout.turn_rewards == (0.5, 8.5, 0.0, -8.0)
    assert rollout.reward == 1.0
    parts = by_player([rollout])
    assert [(owner, player, part.reward) for owner, player, part in parts] == [
        (0, 0, 9.0),
        (0, 1, -8.0),
    ]
    assert [part.turn_rewards for *_, part in parts] == [(0.5, 8.5), (0.0, -8.0)]


def test_a_player_keeps_its_number_if_another_one_begins(task, monkeypatch):
    monkeypatch.setattr(Higher, "first", 1)
    parts = by_player([play(task, [9, 2, 4, 3])])
    assert [(player, part.reward) for _, player, part in parts] == [(1, 9.0), (0, -8.0)]
    assert [part.players for *_, part in parts] == [(1,), (0,)]


def test_a_player_who_reads_the_conversation_of_another_has_its_own(task, monkeypatch):
    """The words of the other player are no answers of this one."""
    shared = [{"role": "system", "content": "You are players."}]

    def opening(game, player):
        said = {"role": "user", "content": "Write a number."}
        return [*shared, said, {"role": "assistant", "content": "1"}] if player else shared

    def environment(task, prompt, sample):
        # answers then begin without the empty thought, as in the opening
        return task.game(task.dialect, enable_thinking=True)

    monkeypatch.setattr(Higher, "opening", opening)
    monkeypatch.setattr(HigherTask, "environment", environment)
    rollout = play(task, [1, 2, 4, 3])
    assert rollout.players == (0, 1)
    sampled = [task.tokenizer.decode(each.tokens[each.sampled]) for each in rollout.sequences]
    assert sampled == ["1<|im_end|>4<|im_end|>", "2<|im_end|>3<|im_end|>"]


def test_a_player_below_0_costs_the_group(task, monkeypatch):
    monkeypatch.setattr(Higher, "start", lambda _: Move(player=-1))
    with pytest.raises(GroupLost, match="give a player from 0"):
        play(task, [1])


GAMES = [[1, 2, 4, 3], [1, 5, 2, 3], [3, 1, 3, 2]]


def scored(task, **fields):
    """Return the rollouts of GAMES, the batch with advantages, and the algorithm."""
    config = find_config("quickstart")()
    config.algorithm.credit = "player"
    for name, value in fields.items():
        setattr(config.algorithm, name, value)
    rollouts = [play(task, numbers, sample) for sample, numbers in enumerate(GAMES)]
    batch = make_batch(rollouts)
    batch.columns["old_values"] = torch.zeros(len(batch.tokens))
    algorithm = build_algorithm(config)
    rewards = torch.tensor([rollout.reward for rollout in rollouts])
    algorithm.score(batch, rollouts, rewards)
    return rollouts, batch, algorithm


def test_a_player_is_compared_with_the_same_player_in_other_games(task):
    advantage = GroupAdvantage.Config(normalize_std=False)
    rollouts, batch, algorithm = scored(task, advantage=advantage)
    first = torch.tensor([0.0, -5.0, 3.0], dtype=torch.float64)
    wanted = torch.stack([first - first.mean(), -first + first.mean()], dim=1)  # [game, player]
    found = batch.columns["advantages"]
    rows = iter(found.split(batch.lengths.tolist()))
    masks = iter(batch.loss_mask.split(batch.lengths.tolist()))
    for game in range(3):
        for player in range(2):
            mask = next(masks)
            values = next(rows)[mask].double()
            torch.testing.assert_close(values, wanted[game, player].expand(len(values)))
    keys = {algorithm.reward_key(rollout) for rollout in rollouts}
    assert len(keys) == 3, "all games sum to 0, and differ for each player"


def test_answers_of_a_player_get_the_rewards_that_the_player_has_later(task):
    rollouts, batch, _ = scored(task, advantage=GAE.Config(lam=1.0, whiten=False))
    found = batch.columns["returns"][batch.loss_mask].split(counts_of(rollouts).tolist())
    for returns, won in zip(found, (0.0, -5.0, 3.0), strict=True):
        half = len(returns) // 2
        wanted = torch.tensor([won] * half + [-won] * half)
        torch.testing.assert_close(returns, wanted)


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ({1: 1.0}, "player 1 has a reward and has not answered"),
        ({0: float("nan")}, "reward=nan, which is not a finite"),
    ],
)
def test_a_reward_that_no_answer_has_costs_the_group(task, monkeypatch, rewards, said):
    monkeypatch.setattr(Higher, "move", lambda *_: Move(rewards=rewards, done=True))
    with pytest.raises(GroupLost, match=said):
        play(task, [1])


def test_a_reward_of_an_answer_that_is_none_costs_the_group(task, monkeypatch):
    reply = Higher._reply

    def replied(self, move):
        made = reply(self, move)
        return type(made)(done=True, earlier={7: 1.0}) if self._turns else made

    monkeypatch.setattr(Higher, "_reply", replied)
    with pytest.raises(GroupLost, match="earlier={7: 1.0}, which are not finite rewards of earl"):
        play(task, [1])


def test_a_task_without_environments_has_no_players(model):
    config = find_config("quickstart")()
    config.algorithm.credit = "player"
    with pytest.raises(ConfigError, match="algorithm.credit is 'player'; it must be 'episode'"):
        validate(config)
    config.task = GuessingGame.Config(max_episode_tokens=512)
    config.model = model
    config.rollout.max_tokens = 16
    validate(config)
