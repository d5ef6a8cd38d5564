"""Engine runs of the tests, in any layout; the same code runs on one rank and on four."""

import contextlib
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TrainingConfig

from rl.algorithms.losses import ClippedLoss, GSPOLoss, Metric, PolicyLoss, dapo, grpo
from rl.metrics import Reduction
from rl.model.digest import digests
from rl.model.shape import ModelConfig
from rl.model.shards import Shards
from rl.tinker.losses import TinkerLoss
from rl.training.checkpoint import Checkpointer
from rl.training.engine import TrainingEngine
from rl.training.sharded_model import shard_of
from rl.training.trainer_config import BalanceConfig, TrainerConfig
from rl.types import Batch, Head
from tests.kit.batches import (
    VOCAB_SIZE,
    broken,
    ragged_batch,
    with_experts,
    with_mask,
    with_prompts,
    with_targets,
    without_advantages,
)
from tests.kit.layouts import LAYOUTS, Layout
from tests.kit.reference import BALANCE

# 46 over tensor parallel 2 is 23, which FSDP over 2 then cuts unevenly; 15 is no multiple of any
# padding.
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "hidden_dim": 46,
}
TIED_FUSED = ModelConfig(**SIZES, max_seq_len=15, tie_embeddings=True, fuse_qkv=True)
UNTIED_SPLIT = ModelConfig(**SIZES, max_seq_len=15, tie_embeddings=False, fuse_qkv=False)
EXPERTS = replace(TIED_FUSED, num_experts=4, experts_per_token=2, moe_hidden_dim=20)
FEW_EXPERTS = replace(
    EXPERTS, num_experts=2, tie_embeddings=False
)  # fewer than four ranks: FSDP cuts within them
BIASED = replace(TIED_FUSED, family="tests.kit.seed_oss")
CLAMPED = replace(EXPERTS, family="gpt_oss")  # the first of two layers has a window of 8 tokens
FEW_CLAMPED = replace(CLAMPED, num_experts=2, tie_embeddings=False)
MODELS = {
    "tied_fused": TIED_FUSED,
    "untied_split": UNTIED_SPLIT,
    "biased": BIASED,
    "experts": EXPERTS,
}
HYBRID = replace(EXPERTS, family="qwen3_5_moe_text")  # the last of two layers has attention
LAID_OUT = MODELS | {"hybrid": HYBRID}
"""Models that layouts are compared with, one of which has no calculation by hand."""

TEMPERATURE = 0.7
LOSS = dapo(entropy_coef=0.05, kl_coef=0.1)


class MeasuredLoss(ClippedLoss):
    """The clipped loss with the entropy by every reduction, weighted and not."""

    @dataclass(kw_only=True, slots=True)
    class Config(ClippedLoss.Config):
        pass

    def surrogate(self, tokens):
        costs, metrics = super().surrogate(tokens)
        weights = (tokens["advantages"] - 0.5).clamp(min=0.0)
        for rule in get_args(Reduction):
            metrics[f"plain/{rule}"] = Metric(tokens["entropy"], rule)
            metrics[f"weighted/{rule}"] = Metric(tokens["entropy"], rule, weights)
        return costs, metrics


MEASURED = MeasuredLoss.Config(clip_high=0.28, entropy_coef=0.05, kl_coef=0.1)
SIGNED = TinkerLoss.Config(name="cross_entropy")
BY_SEQUENCE = GSPOLoss.Config(clip_low=0.25, clip_high=0.25, entropy_coef=0.05)
RUN_STATE = {"step": 2, "next_ordinal": 64, "name": "a run"}


def engine_of(
    model: ModelConfig,
    *,
    folder: str,
    layout: Layout | None = None,
    lr: float = 1e-3,
    decay: float = 0.1,
    warmup: int = 0,
    max_norm: float = 1.0,
    dtype: str = "float32",
    steps: int = 20,
    head: Head = "logprobs",
    loads: bool = False,
    **trainer: Any,
) -> TrainingEngine:
    """Return an engine with random weights three times torchtitan's, so that some tokens are more
    likely, and biases and sinks that are not 0. It computes with the experts that a batch has, and
    balances them.
    """
    replay = "generator" if model.num_experts else "none"
    balance = BalanceConfig(loss_coefficient=BALANCE if model.num_experts else 0.0)
    config = TrainerConfig(
        parallelism=(layout or Layout()).parallelism,
        training=TrainingConfig(mixed_precision_param=dtype, max_norm=max_norm),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=warmup, decay_ratio=0.0),
        **{
            **{"micro_batch_size": 2, "router_replay": replay, "balance": balance},
            **{"optimizer": default_adamw(lr=lr, weight_decay=decay), **trainer},
        },
    )
    engine = TrainingEngine(
        config, model, head=head, seed=0, steps=steps, folder=folder, loads=loads
    )
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
            is_zero = name.endswith(("bias", "sinks")) and parameter.ndim == 1
            parameter.add_(0.1 if is_zero else 0.0)
    return engine


def rows_of(engine: TrainingEngine, batch: Batch) -> list[int]:
    """The rows of the batch that are the rank's own."""
    return batch.shares(engine.dp_degree)[engine.dp_rank]


def checkpointer_of(
    engine: TrainingEngine, folder: str, model: ModelConfig = TIED_FUSED, **checkpoint: object
) -> Checkpointer:
    """Return a checkpointer with fields of its config set."""
    engine.config.checkpoint = replace(engine.config.checkpoint, **checkpoint)
    return Checkpointer(engine, model, folder=folder)


def saved(engine: TrainingEngine, folder: str, state: dict[str, Any]) -> Path:
    """Save checkpoint 1 with ``state``; return its folder."""
    checkpointer = checkpointer_of(engine, folder)
    checkpointer.save(1, state)
    checkpointer.close()
    return Path(folder) / "checkpoints" / "step-1"


def loaded(
    engine: TrainingEngine, folder: str, model: ModelConfig = TIED_FUSED, **checkpoint: object
) -> dict[str, Any]:
    """Load what a run in ``folder`` starts from; return the state."""
    checkpointer = checkpointer_of(engine, folder, model, **checkpoint)
    try:
        return checkpointer.load()
    finally:
        checkpointer.close()


def exported(engine: TrainingEngine, model: ModelConfig, folder: Path) -> Path:
    """Export to the folder ``out`` in ``folder``; return it."""
    checkpointer = Checkpointer(engine, model, folder=str(folder))
    checkpointer.export_hf(str(folder / "out"))
    checkpointer.close()
    return folder / "out"


def share(engine: TrainingEngine, batch: Batch) -> Batch:
    """The part of the batch that is the rank's own."""
    return batch.select(rows_of(engine, batch))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, gathered by torch itself."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in engine.model.named_parameters()}


def gradients_of(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """Return the whole gradients of trained parameters."""
    parameters = engine.model.named_parameters()
    return {canonical_fqn(name): whole(p.grad) for name, p in parameters if p.requires_grad}


@torch.no_grad()
def logits_of(engine: TrainingEngine, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, L, V] of sequences of one length: the model itself only ends in log-probs."""
    kept: list[torch.Tensor] = []
    handle = engine.model.norm.register_forward_hook(
        lambda module, given, hidden: kept.append(hidden)
    )
    lengths = torch.full((len(tokens),), tokens.shape[1] + 1)
    padded = torch.cat([tokens, tokens[:, :1]], dim=1).flatten()
    engine.config.micro_batch_size = len(tokens)
    engine.forward(Batch(tokens=padded, lengths=lengths, loss_weights=torch.ones(len(padded))))
    handle.remove()
    hidden = kept[0].flatten(0, 1)[: tokens.numel()].unflatten(0, tokens.shape)
    head = engine.model.lm_head
    logits = hidden @ whole(head.weight).T / head.scale
    return head.cap * torch.tanh(logits / head.cap) if head.cap else logits


def accumulate(
    engine: TrainingEngine, *batches: Batch, loss: PolicyLoss.Config = LOSS
) -> dict[str, Any]:
    """Gradients, outputs and metrics of a call for each of ``batches``, and of a step."""
    calls = [
        engine.forward_backward(share(engine, batch), loss.build(), temperature=TEMPERATURE)
        for batch in batches
    ]
    return {
        "gradients": gradients_of(engine),
        "outputs": [outputs for outputs, _ in calls],
        "metrics": [metrics for _, metrics in calls],
        "step": engine.optim_step(),
    }


def learn(engine: TrainingEngine, batch: Batch, **options: float) -> dict[str, float]:
    """One optimizer step with ``options``."""
    _, metrics = engine.forward_backward(
        share(engine, batch), LOSS.build(), temperature=TEMPERATURE
    )
    return {**metrics, **engine.optim_step(**options), "version": engine.version}


@dataclass(frozen=True)
class Cut:
    """Batches, each one call, how each is cut into micro-batches, and the loss."""

    batches: tuple[Batch, ...] = (ragged_batch(),)
    fields: dict[str, Any] = field(default_factory=dict)
    loss: PolicyLoss.Config = field(default_factory=lambda: LOSS)


SIBLINGS = (9, 15, 1, 7, 11)
CUTS = {
    "one by one": Cut(fields={"micro_batch_size": 1}),
    "by two": Cut(fields={"micro_batch_size": 2}, loss=MEASURED),
    "by three, experts": Cut((with_experts(ragged_batch()),), fields={"micro_batch_size": 3}),
    "all at once": Cut(fields={"micro_batch_size": 5}),
    "padded": Cut(fields={"micro_batch_size": 3, "packing": False}),
    "20 tokens, experts": Cut((with_experts(ragged_batch()),), fields={"micro_batch_tokens": 20}),
    "32 tokens, padded": Cut(fields={"micro_batch_tokens": 32, "packing": False}),
    "two calls": Cut(
        (ragged_batch().select([0, 1]), ragged_batch().select([2, 3, 4])), loss=MEASURED
    ),
    "one row": Cut((ragged_batch().select([3]),)),
    "policy alone": Cut(loss=grpo()),
    "entropy alone": Cut((without_advantages(),), loss=grpo(entropy_coef=0.3)),
    "ratios of sequences, experts": Cut(
        (with_experts(ragged_batch()),), fields={"micro_batch_size": 3}, loss=BY_SEQUENCE
    ),
    "KL alone": Cut((without_advantages(),), loss=grpo(kl_coef=0.3)),
    "sampling masks": Cut((with_mask(ragged_batch()),), fields={"micro_batch_size": 3}),
    "sampling masks, experts, padded, two calls": Cut(
        tuple(with_mask(with_experts(ragged_batch())).select(rows) for rows in ([3, 0], [1, 2, 4])),
        fields={"micro_batch_size": 2, "packing": False},
    ),
    "shared prompts": Cut(
        (with_prompts(ragged_batch(SIBLINGS), [0, 0, 1, 0, 0]),),
        fields={"micro_batch_size": 5, "prompt_sharing": 3},
    ),
    "shared prompts, sampling masks, experts, 32 tokens": Cut(
        (with_mask(with_experts(with_prompts(ragged_batch(SIBLINGS), [0, 1, 1, 1, 0]))),),
        fields={"micro_batch_tokens": 32, "prompt_sharing": 5},
    ),
    "three targets": Cut(
        (with_targets(ragged_batch(), 3),), fields={"micro_batch_size": 3}, loss=SIGNED
    ),
    "targets, shared prompts, two calls": Cut(
        tuple(
            with_targets(with_prompts(ragged_batch(SIBLINGS), [0, 0, 1, 0, 0])).select(rows)
            for rows in ([0, 1, 3], [4, 2])
        ),
        fields={"micro_batch_size": 5, "prompt_sharing": 3},
        loss=SIGNED,
    ),
}
KINDS = (
    "by two",
    "one row",
    "ratios of sequences, experts",
    "sampling masks, experts, padded, two calls",
    "shared prompts, sampling masks, experts, 32 tokens",
    "three targets",
)
"""Cuts of which each is of another kind."""


def cut_by(
    engine: TrainingEngine,
    *,
    micro_batch_size=2,
    micro_batch_tokens=None,
    packing=True,
    prompt_sharing=1,
) -> None:
    config = engine.config
    config.prompt_sharing = prompt_sharing
    config.micro_batch_size = micro_batch_size
    config.micro_batch_tokens = micro_batch_tokens
    config.packing = packing


def play(name: str, layout: str, folder: str, cuts: Sequence[str]) -> dict[str, Any]:
    """Return the values that the layout tests compare, with the gradients of ``cuts``."""
    model = LAID_OUT[name]
    place = {"folder": folder, "layout": LAYOUTS[layout]}
    still = engine_of(model, lr=0.0, **place)
    result: dict[str, Any] = {
        "weights": weights_of(still),
        "dp": (still.dp_rank, still.dp_degree),
        "leader": still.is_leader,
        "cuts": {},
    }
    boxes = {name: shard.box for name, shard in still.shards().items()}
    result["share"] = rows_of(still, ragged_batch())
    result["forward"] = still.forward(share(still, ragged_batch()), temperature=TEMPERATURE)
    result["moved_parts"] = [
        name for name, shard in still.shards().items() if shard.box != boxes[name]
    ]
    for name in cuts:
        cut = CUTS[name]
        cut_by(still, **cut.fields)
        result["cuts"][name] = accumulate(still, *cut.batches, loss=cut.loss)

    engine = engine_of(model, warmup=4, **place)
    shards = engine.shards()  # before the first forward, as a publisher takes them
    steps = [learn(engine, ragged_batch(seed=1))]
    before = weights_of(engine)
    steps.append(learn(engine, broken(ragged_batch(), row=1)))
    result["skipping_changed"] = unequal(before, weights_of(engine))
    steps.append(learn(engine, ragged_batch(seed=2)))

    checkpointer = Checkpointer(engine, model, folder=folder)
    checkpointer.save(2, RUN_STATE)
    result |= {"saved": digests(engine.shards().values()), "drawn": torch.rand(4)}
    steps.append(learn(engine, ragged_batch(seed=3)))
    checkpointer.export_hf(f"{folder}/export")
    result["stale_parts"] = stale_parts(engine, shards)
    result |= {"steps": steps, "final": weights_of(engine)}
    checkpointer.close()
    return result


def unequal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not in both, bit for bit."""
    both = one.keys() & other.keys()
    return [name for name in one | other if name not in both or not one[name].equal(other[name])]


def stale_parts(engine: TrainingEngine, shards: Shards) -> list[str]:
    """Names of the shards, taken before, that are not the engine's weights now."""
    before, now = (
        {name: shard.tensor for name, shard in each.items()} for each in (shards, engine.shards())
    )
    return unequal(before, now)


def held(model: ModelConfig, layout: Layout, folder: str, **trainer: Any) -> dict[str, Any]:
    """Return digests of a rank's weights, and the whole gradient of batches of 5 rows and 1."""
    engine = engine_of(model, folder=folder, layout=layout, **trainer)
    of_parts = digests(engine.shards().values())
    batch = ragged_batch()
    if model.num_experts:
        batch = with_experts(batch, model.num_experts)
    return {"digests": of_parts} | accumulate(engine, batch, ragged_batch().select([3]))


def resume(name: str, layout: str, folder: str) -> dict[str, Any]:
    """Load the newest checkpoint in ``folder`` and take the step that ``play`` took after it."""
    engine = engine_of(MODELS[name], folder=folder, layout=LAYOUTS[layout], warmup=4)
    checkpointer = Checkpointer(engine, MODELS[name], folder=folder)
    state = checkpointer.load()
    result = {
        "run_state": state,
        "ignored": checkpointer.ignored,
        "loaded": (engine.version, engine.skipped_steps),
    }
    checkpointer.close()
    result |= {"weights": digests(engine.shards().values()), "drawn": torch.rand(4)}
    return result | {"step": learn(engine, ragged_batch(seed=3))}


def everything(engine: TrainingEngine) -> Shards:
    """This rank's parts of the weights and of the optimizer's moments."""
    state = engine.optimizers.state_dict().items()
    moments = {name: each for name, each in state if name.endswith(("exp_avg", "exp_avg_sq"))}
    return engine.shards() | {name: shard_of(name, each) for name, each in moments.items()}


@contextlib.contextmanager
def full_disk(free: int = 4096) -> Iterator[None]:
    """Limit files of this process to ``free`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
