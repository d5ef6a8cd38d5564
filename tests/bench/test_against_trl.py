"""The benchmark against TRL, as far as it goes without TRL."""

import subprocess

import pytest

from rl.cli.arguments import parse_config
from rl.trainers.trial import try_task
from rl.types import Completion
from tests.kit.scripts import module_fixture
from tests.kit.tables import long

SCRIPT = "scripts/bench/against_trl.py"


against_trl = module_fixture(SCRIPT)


@pytest.mark.parametrize(
    ("kind", "step", "stops"),
    [
        ("uniform", (8, 8, 16, 32), ()),
        long("varied", (8, 8, 16, 128), (1,)),
        long("long_prompts", (4, 8, 512, 64), ()),
    ],
)
def test_our_side_is_asked_for_the_same_work(against_trl, tmp_path, kind, step, stops):
    work = against_trl.WORKS[kind]
    against_trl.write_model(tmp_path, work.model)
    for name, way in against_trl.WAY_OF.items():
        options = ["--model.hf_path", str(tmp_path), *against_trl.WAYS[way][name]]
        arguments = ["--config", f"grpo_ours.{kind}", *options]
        _, config = parse_config(arguments, program="test")
        task = config.task.build(seed=0, model=config.model)
        rollout = config.rollout
        prompt = task.prompt(3)
        assert (
            rollout.prompts_per_step,
            rollout.samples_per_prompt,
            len(prompt.tokens),
            rollout.max_tokens,
        ) == step
        assert prompt.text == work.prompt_text(3) != task.prompt(4).text
        assert prompt.text == " ".join(f"w{token}" for token in prompt.tokens)
        assert task.stop_token_ids == stops
        try_task(config, task)
        tokens = [0, 7, 3, 8, 1]
        completion = Completion(tokens=tokens, logprobs=[], versions=[], finish_reason="length")
        reward = task.score(prompt, task.decode(tokens), completion).reward
        assert reward == (0.5 if stops else 0.4)  # the end is not part of the answer


def test_every_kind_of_work_has_a_config_of_its_size(against_trl):
    for kind, work in against_trl.WORKS.items():
        for name, way in against_trl.WAY_OF.items():
            options = ["--config", f"grpo_ours.{kind}", *against_trl.WAYS[way][name]]
            _, config = parse_config(options, program="test")
            rollout = config.rollout
            size = (rollout.prompts_per_step, rollout.samples_per_prompt, rollout.max_tokens)
            assert size == (work.prompts, work.samples, work.new_tokens)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["varied", "long_prompts"])
def test_our_side_runs_and_a_turn_has_the_steps_that_count(against_trl, tmp_path, kind):
    work = against_trl.WORKS[kind]
    against_trl.write_model(tmp_path / "model", work.model)
    way = ["--rollout.max_staleness", "1"]
    turn = against_trl.run_ours(kind, tmp_path / "model", 2, tmp_path / "run", *way)
    assert turn.steps == 2
    assert turn.seconds > 0
    assert turn.cpu_s > 0
    length = turn.tokens / (turn.steps * work.prompts * work.samples)
    if work.ends:
        assert 0.15 < length / work.new_tokens < 0.35
    else:
        assert length == work.new_tokens


def test_ratios_are_those_of_each_round_with_the_fastest_setting_of_each_side(against_trl):
    def turns(*seconds, tokens=640.0):
        return [against_trl.Turn(each, tokens, 2 * each, 1) for each in seconds]

    sides = {
        "eager": turns(2.0, 4.0, 9.0),
        "compiled": turns(3.0, 3.0, 10.0),
        "threads": turns(2.0, 2.0, 2.0),
        "ranks": turns(3.0, 3.0, 3.0),
        "free": turns(1.0, 1.0, 9.0),
    }
    result = against_trl.result_of(sides, 64)
    assert result["lockstep"] == result["cpu"]["lockstep"] == 1.5
    assert result["asynchronous"] == 2.0
    assert result["spread"] == {"lockstep": [1.0, 4.5], "asynchronous": [1.0, 3.0]}
    assert result["tokens_per_s"]["eager"] == 160.0
    assert result["seconds_per_step"]["threads"] == 2.0
    assert result["mean_length"]["threads"] == 10.0
    sides["threads"] = turns(2.0, 2.0, 2.0, tokens=512.0)
    with pytest.raises(SystemExit, match="different lengths"):
        against_trl.result_of(sides, 64)


def test_a_turn_leaves_out_the_first_steps_and_the_last(against_trl):
    seconds = [9.0, 9.0, 1.0, 2.0, 9.0]
    turn = against_trl.Turn.of(seconds, [10 * each for each in seconds], 6.0, warm_up=2)
    assert (turn.seconds, turn.tokens, turn.steps) == (3.0, 30.0, 2)
    assert (turn.per_s, turn.per_cpu_s) == (10.0, 5.0)


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
