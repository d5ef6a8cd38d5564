"""Two policies play a game: each has its own answers, rewards and gradients."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torchtitan.components.lora import LoRAConverter

from rl.algorithms.batch import make_batch, split_by_player
from rl.algorithms.losses import grpo
from rl.environments.protocol import EnvironmentTask
from rl.environments.self_play import Move, SelfPlay
from rl.errors import RunError
from rl.generation.generator_config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.session.session import Session
from rl.training.trainer_config import AdapterConfig
from tests.kit.numbered_prompts import NumberedPrompts
from tests.kit.tokenizers import make_model
from tests.session.sessions import config_of, trainer_config

LORA = LoRAConverter.Config(rank=4, target_modules=["wqkv", "wo", "w1", "w2", "w3", "lm_head"])
NAMES = ("letters", "others")
"""Adapters of players 0 and 1."""


class Characters(SelfPlay):
    """Each player answers twice. One is rewarded for letters, the other one for other characters.
    The second one begins if the number of the sample is odd.
    """

    def __init__(self, dialect, sample):
        super().__init__(dialect, enable_thinking=False)
        self.sample = sample
        self.answers = 0

    def start(self):
        return Move(player=self.sample % 2, message="Write.")

    def move(self, player, message):
        text = message["content"] or "?"
        share = sum(each.isalpha() for each in text) / len(text)
        self.answers += 1
        return Move(
            player=1 - player,
            message="Write.",
            rewards={player: 1 - share if player else share},
            done=self.answers == 4,
        )


class Play(NumberedPrompts, EnvironmentTask):
    @dataclass(kw_only=True, slots=True)
    class Config(EnvironmentTask.Config):
        pass

    def environment(self, prompt, sample):
        return Characters(self.dialect, sample)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig(
        hf_path=str(make_model(tmp_path_factory.mktemp("model"), "--untied")), max_seq_len=128
    )


class Players:
    """A session with an adapter and snapshots for each player."""

    def __init__(self, session: Session, task: Play, folder: Path):
        self.session = session
        self.task = task
        self.folder = folder
        self.weights: dict[int, Path] = {}

    @classmethod
    async def start(cls, sessions, model, folder, **fields):
        config = config_of(
            model=model,
            trainer=trainer_config(lora=LORA),
            generator=GeneratorConfig(kv_cache_gib=0.05),
            **fields,
        )
        session = await sessions.start_as(config)
        await session.load()
        await session.connect()
        found = cls(session, Play.Config().build(seed=0, model=model), folder)
        for player, name in enumerate(NAMES):
            options = AdapterConfig(rank=4, alpha=16.0, seed=player)
            await session.create_adapter(name, options)
            await found.save(player, 0)
        return found

    async def save(self, player: int, step: int) -> None:
        self.weights[player] = self.folder / f"{NAMES[player]}-{step}"
        await self.session.save_snapshot(self.weights[player], adapter=NAMES[player])

    async def games(self, samples: int = 8, **options):
        options = {"max_tokens": 6, "weights": self.weights} | options
        return await self.session.rollout(
            self.task, [self.task.prompt(0)], samples=samples, **options
        )

    def parts(self, games):
        """Return the answers of each player, and their rewards."""
        whole = torch.tensor([game.reward for game in games])
        return split_by_player(games, whole)[:2]

    async def train(self, games, player: int) -> None:
        """Take a step of the adapter of ``player`` on its own answers."""
        parts, rewards = self.parts(games)
        own = [number for number, part in enumerate(parts) if part.players == (player,)]
        advantages = rewards[own] - rewards[own].mean()
        batch = make_batch([parts[number] for number in own], advantages)
        name = NAMES[player]
        await self.session.forward_backward(batch, grpo(), adapter=name)
        await self.session.optim_step(adapter=name, lr=3e-2)

    async def digests(self):
        return [await self.session.trained_digests(adapter=name) for name in NAMES]

    async def scored(self, games, player: int, **source) -> float:
        """Return the largest error of an answer's log-probs under the weights of ``source``."""
        batch = make_batch([each for each in self.parts(games)[0] if each.players == (player,)])
        outputs = await self.session.forward(batch, **source)
        found = (outputs["logprobs"] - batch.columns["behaviour_logprobs"])[batch.loss_mask]
        return float(found.abs().max())


@pytest.mark.parametrize("beside", [0, 2])
async def test_a_players_answers_are_those_of_its_policy(sessions, model, tmp_path, beside):
    """Whether generators hold one snapshot or both, and whoever begins."""
    players = await Players.start(sessions, model, tmp_path, max_loras=beside)
    async with players.session.running():
        first = await players.games()
        before = await players.digests()
        await players.train(first, 0)
        after = await players.digests()
        assert after[0] != before[0]
        assert after[1] == before[1], "a step of one player changed the other one"
        await players.train(first, 1)
        for player in (0, 1):
            await players.save(player, 1)
        games = await players.games()
        assert [game.players for game in games] == [(0, 1), (1, 0)] * 4
        for player, name in enumerate(NAMES):
            assert await players.scored(games, player, adapter=name) <= 1e-5
            assert await players.scored(games, player, adapter=NAMES[1 - player]) > 1e-3
        for lacking, said in (
            ({0: "base"}, r"weights are those of the players \[0\]; player 1 has none"),
            ({}, r"weights are those of the players \[\]; player 0 has none"),
        ):
            with pytest.raises(RunError, match=said):
                await players.games(weights=lacking)
        mixed = await players.games(weights={0: players.weights[0], 1: "base"})
        assert await players.scored(mixed, 0, adapter=NAMES[0]) <= 1e-5
        assert await players.scored(mixed, 1, weights="base") <= 1e-5
    await players.session.stop()


@pytest.mark.long
async def test_players_with_opposite_aims_both_learn_and_do_so_again(sessions, model, tmp_path):
    runs = []
    for attempt in ("first", "again"):
        players = await Players.start(sessions, model, tmp_path / attempt, max_loras=2)
        async with players.session.running():
            means = []
            for step in range(1, 9):
                games = await players.games(samples=16)
                parts, rewards = players.parts(games)
                who = torch.tensor([part.players[0] for part in parts])
                means.append([float(rewards[who == player].mean()) for player in (0, 1)])
                for player in (0, 1):
                    await players.train(games, player)
                    await players.save(player, step)
            runs.append((means, await players.digests()))
        await players.session.stop()
    assert runs[0] == runs[1]
    (begin, *_, end), _ = runs[0]
    assert end[0] > begin[0] + 0.3
    assert end[1] > begin[1] + 0.3
