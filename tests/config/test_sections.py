"""Sections of a config reach the processes that they are for."""

from dataclasses import replace

import pytest
from torchtitan.components.checkpointer import base as checkpointing

from rl.cli.arguments import find_config
from rl.config import RunConfig, SampledEvaluationConfig
from rl.tasks.copy_digits import CopyDigits
from tests.kit.full_config import full_config


@pytest.fixture(params=["quickstart", "sft_jsonl", "dpo_jsonl", "reward_model_jsonl"])
def config(request, chat_model) -> RunConfig:
    config = find_config(request.param)()
    if request.param != "quickstart":
        config.model.hf_path = str(chat_model)
    return config


def test_every_kind_of_run_gives_its_session_the_fields_of_its_config(config):
    config.max_restarts = 7
    config.seed = 11
    config.steps = 13
    session = config.session()
    assert session.model is config.model
    assert session.trainer is config.trainer
    assert session.hardware is config.hardware
    assert session.deadlines is config.deadlines
    assert session.max_restarts == 7
    assert session.seed == 11
    assert session.optimizer_steps == 13


def test_models_beside_the_policy_have_sections_of_their_own(tmp_path, monkeypatch):
    config = full_config(tmp_path)
    config.trainer.router_replay = "generator"
    config.reference.parallelism = replace(config.reference.parallelism)
    warnings: list[str] = []
    monkeypatch.setattr(checkpointing.logger, "warning", warnings.append)
    roles = config.models()
    assert warnings == []
    critic = roles["critic"].trainer
    assert critic.parallelism is config.critic.parallelism
    assert critic.optimizer is config.critic.optimizer
    assert critic.lr_scheduler is config.critic.lr_scheduler
    assert roles["reference"].trainer.parallelism is config.reference.parallelism
    assert roles["judge"].trainer.parallelism is config.roles["judge"].parallelism
    judge = config.roles["judge"]
    assert roles["judge"].model is judge.model
    assert roles["judge"].trainer.checkpoint.initial_load_path == judge.checkpoint
    replaying = [name for name in roles if roles[name].trainer.router_replay == "generator"]
    assert replaying == ["trainer"]


def test_the_reference_of_preferences_has_a_layout_of_its_own(chat_model):
    config = find_config("dpo_jsonl")()
    config.model.hf_path = str(chat_model)
    reference = config.models()["reference"].trainer
    assert reference.parallelism is config.reference.parallelism


def test_sampled_evaluations_have_the_fields_of_their_section(chat_model):
    config = find_config("sft_jsonl")()
    config.model.hf_path = str(chat_model)
    assert config.session().generator is None
    config.evaluation = SampledEvaluationConfig(
        task=CopyDigits.Config(),
        max_tokens=7,
        temperature=0.5,
        reward_workers=3,
        colocate="all",
    )
    session = config.session()
    assert session.generator is config.evaluation.generator
    assert session.weights is config.evaluation.weights
    assert (session.reward_workers, session.colocate) == (3, "all")
    sampling = config.sampling_run()
    assert (sampling.rollout.max_tokens, sampling.rollout.temperature) == (7, 0.5)


def test_a_server_starts_the_processes_of_its_config():
    config = find_config("serve_tiny")()
    config.colocate = "all"
    session = config.session()
    assert session.trainer == replace(config.trainer, max_skipped_steps=2**31)
    assert session.generator is config.generator
    assert session.weights is config.weights
    assert session.colocate == "all"
