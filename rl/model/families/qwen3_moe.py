"""Qwen3 with experts in every layer."""

from rl.model.families.family import EXPERT_SIZES, Family

FAMILY = Family(
    model_type="qwen3_moe",
    prefix="Qwen3Moe",
    options={
        "attention_bias": ("qkv_bias", "output_bias"),
        "norm_topk_prob": ("route_norm",),
    },
    allowed={
        "use_sliding_window": (False, True),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
    expert_sizes=EXPERT_SIZES,
    has_windows=True,
)
