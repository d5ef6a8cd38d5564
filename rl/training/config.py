"""Fields of the trainer: torchtitan's own dataclasses, and how a batch is cut."""

from dataclasses import dataclass, field
from typing import Annotated

import tyro
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig

from rl.model.shape import ModelConfig
from rl.rules import COSMETIC, MAX_NODES, NUMERICS, PERFORMANCE, at_least

Float8Config = (
    Annotated[Float8LinearConverter.Config, tyro.conf.subcommand("linear")]
    | Annotated[None, tyro.conf.subcommand("none")]
)
LoRAConfig = (
    Annotated[LoRAConverter.Config, tyro.conf.subcommand("on")]
    | Annotated[None, tyro.conf.subcommand("none")]
)


def one_rank() -> ParallelismConfig:
    """torchtitan's parallelism with every degree 1, on the DTensor backend that its Qwen3 needs."""
    return ParallelismConfig(data_parallel_shard_degree=1, spmd_backend="partial_dtensor")


def ranks_of(parallelism: ParallelismConfig) -> int:
    """Processes that a mesh of this layout needs."""
    dp = parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree
    return dp * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree


def adaptable_layers(model: ModelConfig) -> list[str]:
    """torchtitan's names of the linear layers that can have adapters: those of attention and
    feed-forward.
    """
    return [*(["wqkv"] if model.fuse_qkv else ["wq", "wkv"]), "wo", "w1", "w2", "w3"]


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The PolicyTrainer mesh. Its number of ranks is the product of the parallelism degrees."""

    parallelism: ParallelismConfig = field(default_factory=one_rank)
    nodes: Annotated[int, at_least(1, MAX_NODES), PERFORMANCE] = 1
    """Nodes that the ranks are divided among, which must divide them. Reference, critic and other
    roles are on the same nodes: on as many of the first as divide their own ranks."""

    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(mixed_precision_param="float32")
    )
    """dtype, mixed precision and max_norm (gradient clipping) are read; batch sizes are not."""

    optimizer: Annotated[OptimizersContainer.Config, NUMERICS] = field(
        default_factory=lambda: default_adamw(lr=1e-6)
    )
    lr_scheduler: Annotated[LRSchedulersContainer.Config, NUMERICS] = field(
        default_factory=lambda: LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    )
    activation_checkpoint: Annotated[ActivationCheckpointingConfig, PERFORMANCE] = None
    """What the backward pass computes again; trainer.activation-checkpoint:full on the command
    line."""

    float8: Annotated[Float8Config, NUMERICS] = None
    """Linear layers in float8, all but the output head; trainer.float8:linear on the command
    line."""

    lora: Annotated[LoRAConfig, NUMERICS] = None
    """Low-rank adapters, which alone are trained; trainer.lora:on on the command line.
    target_modules are of wqkv (or wq and wkv, where model.fuse_qkv is off), wo, w1, w2 and w3, and
    all of these by default."""

    compile: CompileConfig = field(default_factory=CompileConfig)
    checkpoint: Annotated[CheckpointManager.Config, COSMETIC] = field(
        default_factory=lambda: CheckpointManager.Config(
            enable=True,
            folder="checkpoints",
            interval=50,
            keep_latest_k=2,
            initial_load_model_only=False,
        )
    )
    """folder is inside the run folder; interval is in optimizer steps; keep_latest_k counts
    complete checkpoints.

    A run ends with a checkpoint in any case. A run without one starts from initial_load_path, where
    that is set: a checkpoint of another run, of which initial_load_model_only takes the weights
    alone.
    """
    comm: CommConfig = field(default_factory=lambda: CommConfig(trace_buf_size=0))
    debug: DebugConfig = field(default_factory=DebugConfig)

    micro_batch_size: Annotated[int, at_least(1, 10**6), PERFORMANCE] = 32
    """Most sequences per forward pass of a data-parallel rank, where micro_batch_tokens is
    unset."""

    micro_batch_tokens: Annotated[int | None, at_least(1), PERFORMANCE] = None
    """Most tokens per forward pass of a data-parallel rank, padding included; at least the longest
    sequence."""

    packing: Annotated[bool, PERFORMANCE] = True
    """Whether a row may hold several sequences, each with a mask of its own; else every row is
    padded."""

    logits_mib: Annotated[int, at_least(1, 10**7), PERFORMANCE] = 1024
    """Float32 logits that exist at once on a rank, in MiB; more of them are computed in chunks, and
    twice."""

    max_skipped_steps: Annotated[int, at_least(0), COSMETIC] = 3
    """Optimizer steps in a row that may be skipped for a non-finite gradient; one more ends the
    run."""

    @property
    def dp_degree(self) -> int:
        """Into how many parts a batch is cut."""
        return (
            self.parallelism.data_parallel_replicate_degree
            * self.parallelism.data_parallel_shard_degree
        )

    @property
    def compiles_model(self) -> bool:
        """Whether torch.compile is given the model, and not only the loss."""
        return self.compile.enable and "model" in self.compile.components

    @property
    def ranks(self) -> int:
        """Processes that the mesh needs."""
        return ranks_of(self.parallelism)
