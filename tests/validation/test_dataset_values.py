"""Validation refuses absurd values of every field of the runs that train on examples (C5)."""

import pytest

from rl.algorithms.sequence_losses import KTOLoss
from rl.cli.arguments import find_config
from rl.errors import ConfigError
from rl.validation import validate
from tests.kit.tables import long
from tests.validation.test_values import ABSURD, MORE_ABSURD, check_absurd


@pytest.fixture(params=["sft_jsonl", "dpo_jsonl", "reward_model_jsonl"])
def config(request, chat_model):
    config = find_config(request.param)()
    config.model.hf_path = str(chat_model)
    config.model.max_seq_len = 128
    config.task.max_tokens = 96
    config.trainer.micro_batch_tokens = 256
    config.trainer.optimizer.param_groups[0].optimizer_kwargs["betas"] = [0.9, 0.95]
    return config


@pytest.mark.parametrize("absurds", [ABSURD, long(MORE_ABSURD)])
def test_absurd_numbers_are_refused_by_name_unless_the_rule_allows_them(config, absurds):
    assert check_absurd(config, absurds) > 300


def test_kto_needs_two_examples_a_step(chat_model):
    config = find_config("dpo_jsonl")()
    config.model.hf_path = str(chat_model)
    config.task.max_tokens = 96
    config.loss = KTOLoss.Config()
    validate(config)
    config.examples_per_step = 1
    with pytest.raises(ConfigError, match="examples_per_step is 1; it must be at least 2 with KTO"):
        validate(config)
