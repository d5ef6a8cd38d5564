"""Each family accounts for every key that transformers' config of it has."""

from dataclasses import fields

import pytest
import transformers

from rl.errors import ConfigError
from rl.model.families import BUILT_IN, family_named
from rl.model.families.family import ALLOWED, SIZES
from rl.model.shape import ModelConfig, shape_of

READ = {
    *("rms_norm_eps", "tie_word_embeddings", "rope_parameters", "max_position_embeddings"),
    *("sliding_window", "layer_types", "no_rope_layers", "no_rope_layer_interval"),
    *("swiglu_alpha", "swiglu_limit"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
    *("query_pre_attn_scalar", "original_max_position_embeddings"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim"),
}
"""Keys that the readers take beside sizes, options and allowed values."""
WITHOUT_EFFECT = {
    *("initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("pretraining_tp", "router_aux_loss_coef", "output_router_logits", "eod_token_id"),
}
"""Keys of weights that are drawn, of caches, of generation and of another loss."""
WINDOWS = {"max_window_layers", "sliding_window_pattern"}
"""Keys of which transformers makes ``layer_types``."""


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_key_of_transformers_config_is_read_or_without_effect(name):
    family = family_named(name)
    config_class = getattr(transformers, family.config_class)
    of_all_models = {each.name for each in fields(transformers.PreTrainedConfig)}
    keys = {each.name for each in fields(config_class)} - of_all_models
    known = {*SIZES.values(), *family.expert_sizes.values(), *ALLOWED}
    known |= {*family.options, *family.allowed}
    assert keys - known - READ - WITHOUT_EFFECT - WINDOWS == set()
    assert hasattr(transformers, family.policy_class)
    assert hasattr(transformers, family.reward_class) == family.has_reward_class


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            ModelConfig(family="gemma9"),
            "model.family: 'gemma9' cannot be imported: .*; name one of",
        ),
        (ModelConfig(family="json"), "model.family: 'json' has no FAMILY; name one of cwm, "),
        (ModelConfig(family="llama", num_experts=4), "is 'llama' and model.num_experts is 4"),
        (ModelConfig(family="qwen3_moe"), "is 'qwen3_moe' and model.num_experts is 0"),
    ],
    ids=["unknown", "no family", "experts", "no experts"],
)
def test_a_family_that_does_not_exist_or_fit_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(config)
