"""Validation refuses absurd values of every field of the runs that train on examples (C5)."""

import pytest

from rl.algorithms.sequence_losses import KTOLoss
from rl.cli import find_config
from rl.errors import ConfigError
from rl.validation import validate
from tests.trainers.tiny_chat import tiny_chat_model
from tests.validation.test_values import ABSURD, MORE_ABSURD, numbers, put


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["sft_jsonl", "dpo_jsonl", "reward_model_jsonl"])
def config(request, model):
    config = find_config(request.param)()
    config.model.hf_path = str(model)
    config.model.max_seq_len = 128
    config.task.max_tokens = 96
    config.trainer.micro_batch_tokens = 256
    config.trainer.optimizer.param_groups[0].optimizer_kwargs["betas"] = [0.9, 0.95]
    return config


@pytest.mark.parametrize("absurds", [ABSURD, pytest.param(MORE_ABSURD, marks=pytest.mark.long)])
def test_absurd_numbers_are_refused_by_name_unless_the_rule_allows_them(config, absurds):
    validate(config)
    cases = 0
    for name, value in numbers(config).items():
        assert value.bounds is not None, f"{name} has no rule"
        for absurd in absurds:
            cases += 1
            try:
                validate(put(config, name, absurd))
            except ConfigError as error:
                allowed = value.bounds.complaint(absurd) == "" and not isinstance(absurd, float)
                assert allowed or str(error).startswith(f"{name} is {absurd}; it must be"), error
            else:
                assert value.bounds.complaint(absurd) == "", f"{name} took {absurd}"
        put(config, name, value.content)
    assert cases > 300


def test_kto_needs_two_examples_a_step(model):
    config = find_config("dpo_jsonl")()
    config.model.hf_path = str(model)
    config.task.max_tokens = 96
    config.loss = KTOLoss.Config()
    validate(config)
    config.examples_per_step = 1
    with pytest.raises(ConfigError, match="examples_per_step is 1; it must be at least 2 with KTO"):
        validate(config)
