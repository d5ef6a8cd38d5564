"""The benchmark against TRL, as far as it goes without TRL: our side, the ratios, and an
environment that cannot be.
"""

import subprocess

import pytest

from rl.cli.arguments import parse_config
from rl.trainers.trial import try_task
from rl.types import Completion
from tests.bench.programs import module

SCRIPT = "scripts/bench/against_trl.py"


@pytest.fixture
def against_trl(monkeypatch):
    return module(SCRIPT, monkeypatch)


def test_our_side_is_asked_for_the_same_work(against_trl, tmp_path):
    against_trl.write_model(tmp_path)
    options = ["--model.hf_path", str(tmp_path), "--rollout.max_staleness", "1"]
    arguments = ["--config", "grpo_ours.even_tokens", *options]
    _, config = parse_config(arguments, program="test")
    task = config.task.build(seed=0, model=config.model)
    prompt = task.prompt(3)
    assert len(prompt.tokens) == 16
    assert prompt.text == " ".join(f"w{token}" for token in prompt.tokens)
    assert prompt.tokens != task.prompt(4).tokens
    assert task.stop_token_ids == ()  # nothing ends a completion before its last token
    try_task(config, task)
    completion = Completion(tokens=[0, 1, 3, 8], logprobs=[], versions=[], finish_reason="length")
    assert task.score(prompt, task.decode(completion.tokens), completion).reward == 0.5
    rollout = config.rollout
    assert (rollout.prompts_per_step, rollout.samples_per_prompt, rollout.max_tokens) == (8, 8, 32)


@pytest.mark.long
def test_our_side_runs_and_yields_the_seconds_of_each_step(against_trl, tmp_path):
    against_trl.write_model(tmp_path / "model")
    seconds = against_trl.run_ours(
        tmp_path / "model", 3, tmp_path / "run", "--rollout.max_staleness", "1"
    )
    assert len(seconds) == 3
    assert min(seconds) > 0


def test_ratios_are_those_of_each_round_and_the_better_way_has_the_short_name(against_trl):
    result = against_trl.result_of(
        {"trl": [2.0, 4.0, 9.0], "lockstep": [2.0, 2.0, 2.0], "ahead": [1.0, 1.0, 9.0]}
    )
    assert result["trl_over_lockstep"] == 2.0
    assert result["trl_over_ours"] == result["trl_over_ahead"] == 2.0
    assert result["seconds_per_step"] == {"trl": 4.0, "lockstep": 2.0, "ahead": 1.0}


@pytest.fixture
def commands(monkeypatch):
    """Commands that were run, in place of running them; those after ``works`` fail."""
    ran = []
    ran_ok = {"works": 10**6}

    def run(command, **_):
        ran.append([str(word) for word in command])
        code = int(len(ran) > ran_ok["works"])
        return subprocess.CompletedProcess(command, code, "", "no such package\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    return ran, ran_ok


def test_a_failed_installation_is_reported_with_the_installers_message(
    against_trl, tmp_path, commands
):
    ran, ran_ok = commands
    ran_ok["works"] = 1
    said = f"no such package\nagainst_trl: TRL could not be installed into {tmp_path}"
    with pytest.raises(SystemExit, match=said):
        against_trl.trl_python(tmp_path)
    assert len(ran) == 2  # the second failed


def test_an_environment_of_the_pinned_packages_is_used_again(
    against_trl, tmp_path, commands, monkeypatch
):
    ran, _ = commands
    python = against_trl.trl_python(tmp_path)
    assert ran[-1][-7:] == ["--find-links", "/wheels", *against_trl.PINNED]
    assert against_trl.trl_python(tmp_path) == python
    assert len(ran) == 3
    monkeypatch.setattr(against_trl, "PINNED", ("trl==2",))
    against_trl.trl_python(tmp_path)
    assert len(ran) == 6
