"""Mixtral 8x7B and 8x22B."""

from rl.model.families.family import LOCAL_EXPERT_SIZES, Family

EXPERTS = "layers.{}.moe.routed_experts.inner_experts"
THEIRS = "model.layers.{}.block_sparse_moe"

FAMILY = Family(
    model_type="mixtral",
    prefix="Mixtral",
    fixed={"qk_norm": False, "norm_eps": 1e-5},
    allowed={"router_jitter_noise": (0.0, None)},
    expert_sizes=LOCAL_EXPERT_SIZES,
    has_windows=True,
    tensors={
        "layers.{}.moe.router.gate.weight": f"{THEIRS}.gate.weight",
        f"{EXPERTS}.w1_EFD": f"{THEIRS}.experts.{{}}.w1.weight",
        f"{EXPERTS}.w2_EDF": f"{THEIRS}.experts.{{}}.w2.weight",
        f"{EXPERTS}.w3_EFD": f"{THEIRS}.experts.{{}}.w3.weight",
    },
)
