"""The program that plays an episode in the terminal."""

import subprocess
import sys

import pytest

from rl.cli.arguments import parse_config
from rl.play import main


@pytest.fixture
def arguments(tiny_model) -> list[str]:
    return ["--config", "tests.e2e.configs.guessing", "--model.hf_path", str(tiny_model)]


def test_a_person_plays_and_sees_the_tokens_of_each_turn(arguments):
    def number_of(arguments: list[str], prompt_id: int) -> int:
        _, config = parse_config(arguments, program="test")
        return int(config.task.build(seed=config.seed, model=config.model).prompt(prompt_id).answer)

    number = number_of(arguments, 2)
    assert number != 50
    typed = f"Is it 50?\n\nperhaps\n{number}\n\n"
    done = subprocess.run(
        [sys.executable, "-m", "rl.play", *arguments, "--prompt", "2"],
        input=typed,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    turns = done.stdout.split("\n[")
    kinds = [turn.split(":")[0] for turn in turns]
    assert kinds == ["", "fed", "sampled", "fed", "sampled"]
    assert "<|im_start|>|user|\\n|I" in turns[1]
    assert turns[2].splitlines()[1].endswith("|<|im_end|>")
    assert ("lower" if number < 50 else "higher") in turns[3].replace("|", "")
    assert "done: reward 0.9, correct\n" in done.stdout
    assert "turns  2.0" in done.stdout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--config", "quickstart"], "the task of this RLConfig has no environment to play"),
        (["--config", "quickstart", "--prompt", "-1"], "--prompt -1: it must be 0 or above"),
        (["--config", "quickstart", "--step", "3"], "--step needs --run RUN"),
        (["--run", "nowhere"], "nowhere is not the folder of a run"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(given, words, capsys):
    assert main(given) == 2
    assert words in capsys.readouterr().err
