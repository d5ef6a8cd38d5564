"""Qwen3 in the sizes that people train, for nodes of eight H100s: --model.hf_path DIR --task.path
FILE.
"""

from dataclasses import replace
from typing import Any

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC

from rl.algorithms.losses import dapo
from rl.config import EvaluationConfig, PolicyGradientConfig, RLConfig, RolloutConfig
from rl.generation.generator_config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.session.hardware import HardwareConfig
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.training.trainer_config import TrainerConfig

PROMPT = 1024
COMPLETION = 3072


def qwen3_0_6b() -> RLConfig:
    """Qwen3-0.6B on one node: two GPUs train, six generate."""
    model = _qwen3(dim=1024, n_layers=28, n_heads=16, hidden_dim=3072, tie_embeddings=True)
    return _recipe(model, shard=2, replicas=6, own_nodes=0)


def qwen3_1_7b() -> RLConfig:
    """Qwen3-1.7B on one node: four GPUs train, four generate."""
    model = _qwen3(dim=2048, n_layers=28, n_heads=16, hidden_dim=6144, tie_embeddings=True)
    return _recipe(model, shard=4, replicas=4, own_nodes=0)


def qwen3_8b() -> RLConfig:
    """Qwen3-8B on one node: four GPUs train, four generate."""
    return _recipe(_qwen3_8b(), shard=4, replicas=4, own_nodes=0)


def qwen3_8b_2_nodes() -> RLConfig:
    """Qwen3-8B on two nodes: one trains, one generates."""
    return _recipe(_qwen3_8b(), shard=8, replicas=8, own_nodes=1)


def qwen3_14b() -> RLConfig:
    """Qwen3-14B on two nodes: one trains, one generates."""
    return _recipe(_qwen3_14b(), shard=8, replicas=8, own_nodes=1)


def qwen3_14b_4_nodes() -> RLConfig:
    """Qwen3-14B on four nodes: two train, two generate."""
    return _recipe(_qwen3_14b(), nodes=2, shard=16, replicas=16, own_nodes=2)


def qwen3_30b_a3b() -> RLConfig:
    """Qwen3-30B-A3B on four nodes: two train, with experts divided within a node, two generate."""
    return _recipe(_qwen3_30b_a3b(), nodes=2, shard=16, experts=8, replicas=8, tp=2, own_nodes=2)


def qwen3_30b_a3b_8_nodes() -> RLConfig:
    """Qwen3-30B-A3B on eight nodes: two train, with experts divided within a node, six generate."""
    return _recipe(_qwen3_30b_a3b(), nodes=2, shard=16, experts=8, replicas=24, tp=2, own_nodes=6)


def _qwen3_8b() -> ModelConfig:
    return _qwen3(dim=4096, n_layers=36, n_heads=32, hidden_dim=12288)


def _qwen3_14b() -> ModelConfig:
    return _qwen3(dim=5120, n_layers=40, n_heads=40, hidden_dim=17408)


def _qwen3_30b_a3b() -> ModelConfig:
    dense = _qwen3(dim=2048, n_layers=48, n_heads=32, hidden_dim=6144)
    return replace(dense, n_kv_heads=4, num_experts=128, experts_per_token=8, moe_hidden_dim=768)


def _qwen3(*, tie_embeddings: bool = False, **sizes: Any) -> ModelConfig:
    """Return a model with the fields that all sizes share; ``model.hf_path`` replaces them."""
    return ModelConfig(
        vocab_size=151_936,
        n_kv_heads=8,
        head_dim=128,
        tie_embeddings=tie_embeddings,
        max_seq_len=PROMPT + COMPLETION,
        **sizes,
    )


def _recipe(
    model: ModelConfig,
    *,
    shard: int,
    replicas: int,
    own_nodes: int,
    nodes: int = 1,
    experts: int = 1,
    tp: int = 1,
) -> RLConfig:
    """DAPO's loss one step off policy, in bfloat16: ``shard`` GPUs train, ``replicas * tp``
    generate.
    """
    return RLConfig(
        steps=500,
        task=Gsm8kJsonl.Config(max_prompt_tokens=PROMPT),
        model=model,
        rollout=RolloutConfig(
            prompts_per_step=128,
            samples_per_prompt=8,
            max_tokens=COMPLETION,
            max_staleness=1,
            reward_workers=4,
        ),
        algorithm=PolicyGradientConfig(loss=dapo(), overlong_buffer=512),
        trainer=TrainerConfig(
            parallelism=ParallelismConfig(
                data_parallel_shard_degree=shard,
                expert_parallel_degree=experts,
                spmd_backend="partial_dtensor",
            ),
            nodes=nodes,
            training=TrainingConfig(mixed_precision_param="bfloat16"),
            optimizer=default_adamw(lr=1e-6, weight_decay=0.1),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.0),
            activation_checkpoint=FullAC.Config(),
            checkpoint=CheckpointManager.Config(
                enable=True,
                folder="checkpoints",
                interval=50,
                keep_latest_k=2,
                initial_load_model_only=False,
                async_mode="async",
            ),
            micro_batch_tokens=4 * (PROMPT + COMPLETION),
        ),
        generator=GeneratorConfig(
            replicas=replicas,
            nodes=own_nodes,
            tensor_parallel_degree=tp,
            dtype="bfloat16",
            gpu_memory_utilization=0.85,
            enforce_eager=model.num_experts
            > 0,  # how many tokens an expert gets is not known when it is compiled
        ),
        evaluation=EvaluationConfig(every=25, prompts=256, samples=4),
        hardware=HardwareConfig(device="h100", gpus_per_node=8),
    )
