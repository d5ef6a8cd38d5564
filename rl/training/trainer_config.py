"""Fields of the trainer: torchtitan's own dataclasses, and the limits of micro-batches."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro
from torchtitan import config as titan
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig

from rl.errors import require
from rl.model.shape import ModelConfig
from rl.types.rules import COSMETIC, MAX_NODES, NUMERICS, PERFORMANCE, at_least

Float8Config = (
    Annotated[Float8LinearConverter.Config, tyro.conf.subcommand("linear")]
    | Annotated[None, tyro.conf.subcommand("none")]
)
LoRAConfig = (
    Annotated[LoRAConverter.Config, tyro.conf.subcommand("on")]
    | Annotated[None, tyro.conf.subcommand("none")]
)


DEGREES = {
    "ddp": "data_parallel_replicate_degree",
    "fsdp": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
}
"""Field of a ParallelismConfig by its short name."""


def one_rank() -> titan.ParallelismConfig:
    """Return torchtitan's parallelism with every degree 1, on the DTensor backend that its Qwen3
    needs.
    """
    return titan.ParallelismConfig(data_parallel_shard_degree=1, spmd_backend="partial_dtensor")


def settle(parallelism: titan.ParallelismConfig) -> None:
    """Replace two defaults of torchtitan, under which no run works, by those of ``one_rank``."""
    if parallelism.data_parallel_shard_degree == -1:  # "the other ranks"; the degrees say how many
        parallelism.data_parallel_shard_degree = 1
    if parallelism.spmd_backend == titan.ParallelismConfig().spmd_backend:
        parallelism.spmd_backend = "partial_dtensor"


def short_layout(parallelism: object) -> str:
    """Return the degrees of a ParallelismConfig above 1, such as "fsdp2-tp2"; "one rank" if all are
    1.
    """
    degrees = ((name, getattr(parallelism, field)) for name, field in DEGREES.items())
    return "-".join(f"{name}{degree}" for name, degree in degrees if degree > 1) or "one rank"


def degrees_of(layout: str, *, option: str) -> dict[str, int]:
    """Return the degree of each field of a ParallelismConfig in a layout such as "fsdp2-tp2".
    Degrees that it leaves out are 1.

    Raises ConfigError, naming ``option``, for another text.
    """
    degrees = dict.fromkeys(DEGREES.values(), 1)
    for part in layout.split("-"):
        found = re.fullmatch(r"([a-z]+)([1-9]\d*)", part)
        name = found[1] if found is not None else ""
        require(
            name in DEGREES,
            f"{option} {layout}: {part!r} is not a degree; write one of {', '.join(DEGREES)} and a "
            "number, such as fsdp2 or fsdp2-tp2",
        )
        assert found is not None
        degrees[DEGREES[name]] = int(found[2])
    return degrees


def ranks_of(parallelism: titan.ParallelismConfig) -> int:
    """Return the number of processes of a mesh with this parallelism."""
    dp = parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree
    return dp * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree


def adaptable_layers(model: ModelConfig) -> list[str]:
    """Return torchtitan's names of the linear layers that can have adapters: those of attention
    and feed-forward.
    """
    return [*(["wqkv"] if model.fuse_qkv else ["wq", "wkv"]), "wo", "w1", "w2", "w3"]


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """PolicyTrainer mesh. Its number of ranks is the product of the parallelism degrees."""

    parallelism: titan.ParallelismConfig = field(default_factory=one_rank)
    """Parallelism degrees; the number of ranks is their product. Pipeline parallelism is
    refused."""

    nodes: Annotated[int, at_least(1, MAX_NODES), PERFORMANCE] = 1
    """Number of nodes that the ranks are divided over; must divide their number. Reference, critic
    and other roles run on the first of these nodes, each on the largest number of them that divides
    its own ranks."""

    training: titan.TrainingConfig = field(
        default_factory=lambda: titan.TrainingConfig(mixed_precision_param="float32")
    )
    """Dtype, mixed precision, gradient clipping (``max_norm``), and the number of optimizer steps
    between collections of Python's garbage (``gc_freq``). Batch sizes, ``seq_len`` and ``steps``
    must keep their defaults: other fields set them."""

    optimizer: Annotated[OptimizersContainer.Config, NUMERICS] = field(
        default_factory=lambda: default_adamw(lr=1e-6)
    )
    """Optimizer of the policy."""

    lr_scheduler: Annotated[LRSchedulersContainer.Config, NUMERICS] = field(
        default_factory=lambda: LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    )
    """Learning rate schedule of the policy."""

    activation_checkpoint: Annotated[ActivationCheckpointingConfig, PERFORMANCE] = None
    """Activations that the backward pass recomputes; for example
    ``trainer.activation-checkpoint:full`` on the command line."""

    float8: Annotated[Float8Config, NUMERICS] = None
    """Float8 for all linear layers except for the output head and the routers of experts;
    ``trainer.float8:linear`` on the command line."""

    lora: Annotated[LoRAConfig, NUMERICS] = None
    """Low-rank adapters; all other weights are frozen. ``trainer.lora:on`` on the command line.
    ``target_modules`` may name wqkv (or wq and wkv if ``model.fuse_qkv`` is off), wo, w1, w2 and
    w3; by default all of them."""

    compile: titan.CompileConfig = field(default_factory=titan.CompileConfig)
    """Use of torch.compile."""

    checkpoint: Annotated[CheckpointManager.Config, COSMETIC] = field(
        default_factory=lambda: CheckpointManager.Config(
            enable=True,
            folder="checkpoints",
            interval=50,
            keep_latest_k=2,
            initial_load_model_only=False,
        )
    )
    """Checkpoints. ``folder`` is inside the run folder, ``interval`` is in steps, and
    ``keep_latest_k`` counts complete checkpoints.

    A run always ends with a checkpoint. A run without a checkpoint starts from
    ``initial_load_path`` if it is set: a checkpoint of another run, or only its weights with
    ``initial_load_model_only``.
    """

    comm: titan.CommConfig = field(default_factory=lambda: titan.CommConfig(trace_buf_size=0))
    """Timeouts and traces of collective communication."""

    debug: titan.DebugConfig = field(default_factory=titan.DebugConfig)
    """Options for debugging and reproducibility."""

    micro_batch_size: Annotated[int, at_least(1, 10**6), PERFORMANCE] = 32
    """Maximum number of sequences per forward pass of a data-parallel rank if
    ``micro_batch_tokens`` is None."""

    micro_batch_tokens: Annotated[int | None, at_least(1), PERFORMANCE] = None
    """Maximum number of tokens per forward pass of a data-parallel rank, including padding; at
    least the length of the longest prompt and completion."""

    packing: Annotated[bool, PERFORMANCE] = True
    """Whether a row may hold several sequences, each with a mask of its own. Rows are filled by
    best fit if ``micro_batch_tokens`` is set. False pads every sequence to a row."""

    prompt_sharing: Annotated[int, at_least(1, 10**6), PERFORMANCE] = 1
    """Maximum number of sequences that share the computation of their prompt: those of a group or
    of a pair. 1 computes every prompt for every sequence. Large numbers pay if prompts are longer
    than completions. Dense attention, which is that of CPU, costs the square of a row's length."""

    logits_mib: Annotated[int, at_least(1, 10**7), PERFORMANCE] = 1024
    """Maximum size of the float32 logits that exist at once on a rank, in MiB. Larger logits are
    computed in chunks, and again in the backward pass."""

    threads: Annotated[int, at_least(1, 1024), NUMERICS] = 1
    """Number of CPU threads that compute for a rank. Use more on a CPU if the model is large and no
    other rank computes meanwhile, as in lockstep. The default gives the same results on hosts with
    any number of cores."""

    cpu_matmul: Annotated[Literal["auto", "mkl", "onednn"], NUMERICS] = "auto"
    """Kernel of float32 matrix products on CPU. ``auto`` is oneDNN on AMD without AVX-512, where
    MKL takes twice as long, and else MKL. The log of a rank names the choice."""

    max_skipped_steps: Annotated[int, at_least(0), COSMETIC] = 3
    """Maximum number of consecutive optimizer steps that may be skipped because of a non-finite
    gradient; one more ends the run."""

    @property
    def dp_degree(self) -> int:
        """Number of parts that a batch is split into."""
        parallelism = self.parallelism
        return parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree

    @property
    def ranks(self) -> int:
        """Number of processes of the mesh."""
        return ranks_of(self.parallelism)
