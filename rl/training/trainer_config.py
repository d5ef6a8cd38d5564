"""Fields of the trainer: torchtitan's own dataclasses, and the limits of micro-batches."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
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

from rl.errors import ConfigError, require
from rl.model.shape import ModelConfig, shape_of
from rl.types.rules import COSMETIC, MAX_NODES, NUMERICS, PERFORMANCE, NeedsCuda, at_least

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


def fill_defaults(parallelism: titan.ParallelismConfig) -> None:
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
        match = re.fullmatch(rf"({'|'.join(DEGREES)})([1-9]\d*)", part)
        if match is None:
            raise ConfigError(
                f"{option} {layout}: {part!r} is not a degree; write one of {', '.join(DEGREES)} "
                "and a number, such as fsdp2 or fsdp2-tp2"
            )
        degrees[DEGREES[match[1]]] = int(match[2])
    return degrees


HEAD = "lm_head"
"""torchtitan's name of the output head."""

EXPERTS = "experts"
"""Name of all weights of a layer's experts."""


def adaptable_layers(model: ModelConfig) -> list[str]:
    """Return the names of the layers that have adapters by default: torchtitan's names of the
    linear layers of attention, of gated delta nets and feed-forward, or ``EXPERTS`` in place of
    the last.
    """
    shape = shape_of(model)
    feed_forward = [EXPERTS] if shape.num_experts else ["w1", "w2", "w3"]
    delta_net = ["qkv", "z"] if shape.layers_with_delta_rule else []
    return [*(["wqkv"] if model.fuse_qkv else ["wq", "wkv"]), *delta_net, "wo", *feed_forward]


def lora_layers(lora: LoRAConverter.Config, model: ModelConfig) -> list[str]:
    """Return the names of the layers that ``lora`` gives adapters to.

    Raises ConfigError for an adapter of a head that is tied to the embedding.
    """
    chosen = lora.target_modules or adaptable_layers(model)
    field = "trainer.lora.target_modules"
    is_tied = HEAD in chosen and shape_of(model).tie_embeddings
    require(not is_tied, f"{field} names {HEAD}, which is tied to the embedding", field=field)
    return chosen


PARTS = {
    **dict.fromkeys(("wqkv", "wq", "wkv", "wk", "wv", "wo", "qkv", "z"), "attention"),
    **dict.fromkeys(("w1", "w2", "w3", EXPERTS, "inner_experts"), "mlp"),
    HEAD: "unembedding",
}
"""Field of an AdapterConfig that switches the adapter of a layer, by the name of the layer. wkv is
torchtitan's name of the configs of wk and wv, and inner_experts that of ``EXPERTS``."""

TINKER_NAMES = {"attention": "train_attn", "mlp": "train_mlp", "unembedding": "train_unembed"}
"""Names of these fields in Tinker's API."""

BASE = "base"
"""Source of the weights of the base model, without an adapter."""

Source = str | Path | None
"""Weights of a policy that has adapters: those of the adapter of this name, of the snapshot in this
folder, of ``BASE``, or with None of the policy itself."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """One of several adapters of a base model: see :meth:`rl.Session.create_adapter`."""

    rank: int
    """Rank of its matrices A and B, at most ``trainer.lora.rank``."""

    alpha: float = 32.0
    """Scale of the adapter: alpha / rank * B @ A is added to a weight."""

    seed: int = 0
    """Seed of A. B starts at 0."""

    attention: bool = True
    """Whether the layers of attention are adapted."""

    mlp: bool = True
    """Whether the feed-forward layers, or the experts, are adapted."""

    unembedding: bool = True
    """Whether the output head is adapted. ``trainer.lora.target_modules`` must name lm_head."""

    @property
    def scale(self) -> float:
        """Factor of B @ A."""
        return self.alpha / self.rank

    def adapts(self, parameter: str) -> bool:
        """Return whether the layer is adapted that the parameter LAYER.lora_a.NAME is part of."""
        on: bool = getattr(self, PARTS[parameter.split(".")[-3]])
        return on

    def check(self, lora: LoRAConverter.Config | None, model: ModelConfig) -> None:
        """Raise ConfigError unless a trainer with ``lora`` can train this adapter of ``model``."""
        require(lora is not None, "the trainer has no adapters", field="trainer.lora", fix="set it")
        assert lora is not None
        problem = f"rank is {self.rank}; it must be 1 to trainer.lora.rank={lora.rank}"
        require(1 <= self.rank <= lora.rank, problem, field="rank")
        problem = f"alpha is {self.alpha}; it must be above 0 and finite"
        require(0 < self.alpha < math.inf, problem, field="alpha")
        has = {PARTS[layer] for layer in lora_layers(lora, model)}
        for part, name in TINKER_NAMES.items():
            tied = part == "unembedding" and shape_of(model).tie_embeddings
            why = ": the output head is tied to the embedding" if tied else ""
            problem = f"{part} is True, and the trainer has no adapter for it{why}"
            fix = f"pass {part}=False ({name}=False)"
            require(not getattr(self, part) or part in has, problem, field=part, fix=fix)


@dataclass(kw_only=True, slots=True)
class BalanceConfig:
    """Options that divide tokens evenly among the experts of a layer, for models with experts. No
    token is ever dropped."""

    loss_coefficient: Annotated[float, at_least(0, 1e3), NUMERICS] = 0.0
    """Coefficient of the balance loss of each sequence and layer (arXiv:2412.19437, eqs. 17 to 20),
    which is added to the loss. DeepSeek-V3 has 1e-4."""

    bias_rate: Annotated[float, at_least(0, 1.0), NUMERICS] = 0.0
    """Change of the bias of each expert in an optimizer step (arXiv:2408.15664, algorithm 1). Needs
    ``model.expert_bias``. DeepSeek-V3 has 1e-3."""


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

    dither: Annotated[bool, NUMERICS] = False
    """Whether the float32 weights that the trainer reads from a Hugging Face folder get random
    noise of up to half a rounding step of bfloat16. Their casts to bfloat16 stay the same, and then
    follow updates that are smaller than a step: in the forward pass with
    ``training.mixed_precision_param`` bfloat16, and in generators with ``dtype`` bfloat16. Without
    the noise, a weight that bfloat16 holds exactly has to move by half a step before its cast
    changes."""

    optimizer: Annotated[OptimizersContainer.Config, NUMERICS] = field(
        default_factory=lambda: default_adamw(lr=1e-6)
    )
    """Optimizer of the policy."""

    offload_optimizer: Annotated[bool, PERFORMANCE] = False
    """Whether the moments of Adam and AdamW are in host memory. An optimizer step has two parts of
    at most 256 MiB of them on the device, unless one parameter has more, and copies a part during
    the step of another one. Weights are the same, bit for bit. Without a GPU it only costs time."""

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
    ``target_modules`` may name wqkv (or wq and wkv if ``model.fuse_qkv`` is off), wo, and w1, w2
    and w3, or experts in place of these three if the model has experts; by default all of them. It
    may also name lm_head, the output head, unless that is tied to the embedding."""

    router_replay: Annotated[Literal["none", "generator"], NUMERICS] = "none"
    """Experts that the policy computes with. ``none``: Its routers choose them. ``generator``: They
    are those that the generator computed each token with, with weights from the policy's own
    routers; tokens without a record go to experts that these choose."""

    balance: Annotated[BalanceConfig, NUMERICS] = field(default_factory=BalanceConfig)
    """Balance of the experts."""

    compile: titan.CompileConfig = field(default_factory=titan.CompileConfig)
    """Use of torch.compile."""

    tune_attention: Annotated[bool, PERFORMANCE, NeedsCuda((True,), "False")] = False
    """Whether torch.compile tries several kernels of flex attention and keeps the fastest. That
    takes minutes for each graph."""

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
    least the length of the longest prompt and completion. On GPUs, packed rows of flex attention or
    of a compiled model are padded to quarters of this number."""

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

    threads: Annotated[int | Literal["auto"], at_least(1, 1024), NUMERICS] = "auto"
    """Number of CPU threads that compute for a rank. ``auto`` chooses at the start of a run, whose
    ``config.json`` has the number:

    - 1 on GPUs, and for models of less than 10 million parameters
    - all cores of the host for the trainer, and then for the generators, if they take turns
    - otherwise a part of the cores for each side, by its work

    The ranks of a side divide its cores. Set a number for equal bits on hosts with other numbers of
    cores."""

    cpu_matmul: Annotated[Literal["auto", "mkl", "onednn"], NUMERICS] = "auto"
    """Kernel of float32 matrix products on CPU. ``auto`` chooses at the start of a run, whose
    ``config.json`` has the choice: oneDNN if MKL is measured to take 1.5 times as long or longer,
    and otherwise MKL. The log of a rank names the kernel."""

    zero_gradient: Annotated[Literal["forward", "skip"], PERFORMANCE] = "forward"
    """Computation for sequences whose loss has no gradient: all their advantages are 0, without an
    entropy bonus and a KL penalty in the loss, or all their weights are 0. ``forward``: A forward
    pass, for log-probs and metrics. ``skip``: None; their log-probs are 0, and metrics of tokens
    leave them out. The gradient is the same up to rounding."""

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
        parallelism = self.parallelism
        return self.dp_degree * (
            parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
        )
