"""Recipe for nodes of eight H100s that the configs of all model families share."""

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from rl.algorithms.losses import dapo
from rl.config import EvaluationConfig, PolicyGradientConfig, RLConfig, RolloutConfig
from rl.generation.generator_config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.session.hardware import HardwareConfig
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.training.trainer_config import TrainerConfig

PROMPT = 1024
COMPLETION = 3072


def on_h100s(
    model: ModelConfig,
    *,
    shard: int,
    replicas: int,
    own_nodes: int = 0,
    nodes: int = 1,
    experts: int = 1,
    tp: int = 1,
    recompute: type[SelectiveAC] | type[FullAC] | None = SelectiveAC,
) -> RLConfig:
    """DAPO's loss at most two steps off policy, in bfloat16: ``shard`` GPUs train, ``replicas *
    tp`` generate. ``recompute`` is how activations are recomputed that do not fit.
    """
    return RLConfig(
        steps=500,
        task=Gsm8kJsonl.Config(max_prompt_tokens=PROMPT),
        model=model,
        rollout=RolloutConfig(
            prompts_per_step=128,
            samples_per_prompt=8,
            max_tokens=COMPLETION,
            pipeline="asynchronous",  # no step waits for the longest answer of a batch
            max_staleness=2,  # an answer may take two steps; the loss's ratio corrects for it
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
            # half of the products are kept, which takes 72 of 79 GiB at most
            activation_checkpoint=recompute and recompute.Config(),
            compile=CompileConfig(enable=True),  # fuses norms, rotations and activations
            checkpoint=CheckpointManager.Config(
                enable=True,
                folder="checkpoints",
                interval=50,
                keep_latest_k=2,
                initial_load_model_only=False,
                async_mode="async",
            ),
            # activations of more tokens would have to be recomputed more
            micro_batch_tokens=(4 if recompute is FullAC else 2) * (PROMPT + COMPLETION),
        ),
        generator=GeneratorConfig(
            replicas=replicas,
            nodes=own_nodes,
            tensor_parallel_degree=tp,
            dtype="bfloat16",
            gpu_memory_utilization=0.85,
            enforce_eager=False,  # steps of one token per request are captured in CUDA graphs
        ),
        evaluation=EvaluationConfig(every=25, prompts=256, samples=4),
        hardware=HardwareConfig(device="h100", gpus_per_node=8),
    )
