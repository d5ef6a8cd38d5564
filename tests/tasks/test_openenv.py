import asyncio
import random

import pytest

from rl.errors import ConfigError, GroupLost
from rl.model.shape import ModelConfig
from rl.rollout.environments import Environments
from rl.types import Completion
from tests.tasks.openenv_server import Games, Guess, serving, url_of
from tests.tiny_tokenizers import make_model

WAIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig(hf_path=str(make_model(tmp_path_factory.mktemp("openenv"))))


def play(model, games, *answers):
    """Return the prompt, the turns and the end of an episode of ``answers``."""

    async def work():
        async with asyncio.timeout(WAIT_S), serving(games) as server:
            task = Guess.Config(url=url_of(server)).build(seed=1, model=model)
            prompt = task.prompt(0)
            environments = Environments(task)
            turns = [await environments.open(0, prompt, 0)]
            stop = task.stop_token_ids[0]
            try:
                for answer in answers:
                    tokens = task.tokenizer.encode(answer, add_special_tokens=False)
                    turns.append(await environments.step(0, Completion.written([*tokens, stop])))
            finally:
                await environments.close([0])
            return prompt, [task.tokenizer.decode(turn.tokens) for turn in turns], turns[-1].end

    return asyncio.run(work())


def number_of(prompt):
    return random.Random(int(prompt.answer)).randint(1, 5)


def test_an_episode_is_a_session_with_the_seed_of_its_prompt(model):
    prompt, _, _ = play(model, Games())
    number = number_of(prompt)
    games = Games()
    wrong = number % 5 + 1
    prompt, texts, end = play(model, games, f"{wrong}", f" {number} ")
    assert f"From 1 to 5, seed {prompt.answer}?" in texts[0]
    assert "No." in texts[1]
    assert (end.reward, end.correct, end.turn_rewards) == (1.0, True, (0.0, 1.0))
    assert games.seen == [
        {"type": "reset", "data": {"seed": int(prompt.answer)}},
        {"type": "step", "data": {"guess": f"{wrong}"}},
        {"type": "step", "data": {"guess": f"{number}"}},
        {"type": "close"},
    ]


def test_an_error_of_the_server_costs_the_group_with_its_message(model):
    with pytest.raises(GroupLost, match=r"server at ws://.* failed: guess: a number is missing"):
        play(model, Games(), "no number")


def test_a_full_server_is_named_with_what_to_do(model):
    games = Games()
    games.is_full = True
    said = r"failed: Server at capacity: 4/4 sessions; .* set task.max_open_episodes to"
    for _ in range(5):  # the connection may end before the first message is sent, or after it
        with pytest.raises(GroupLost, match=said):
            play(model, games)


def test_a_connection_that_ends_costs_the_group(model):
    with pytest.raises(GroupLost, match=r"the connection to ws://.* ended: .*ConnectionClosed"):
        play(model, Games(), "leave")


def test_an_answer_in_another_form_is_named(model):
    games = Games()
    games.garbled = True
    with pytest.raises(GroupLost, match=r"answered '\{' to reset; expected data with an obs"):
        play(model, games)


def test_a_server_that_does_not_answer_is_named(model):
    async def work():
        async with asyncio.timeout(WAIT_S), serving(Games()) as server:
            url = url_of(server)
        task = Guess.Config(url=url).build(seed=1, model=model)
        with pytest.raises(GroupLost, match=f"task.url {url}: cannot connect"):
            await Environments(task).open(0, task.prompt(0), 0)

    asyncio.run(work())


@pytest.mark.parametrize("url", ["", "http://127.0.0.1/ws"])
def test_an_address_of_something_else_is_refused(url, model):
    with pytest.raises(ConfigError, match=f"task.url is '{url}'; it must be the address of a Web"):
        Guess.Config(url=url).build(seed=1, model=model)
