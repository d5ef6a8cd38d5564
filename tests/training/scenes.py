"""Engine runs of the tests, in any layout; the same code runs on one rank and on four."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TrainingConfig

from rl.algorithms.losses import ClippedLoss, GSPOLoss, Metric, PolicyLoss, dapo, grpo
from rl.metrics import Reduction
from rl.model.digest import digests
from rl.model.shape import ModelConfig
from rl.training.checkpoint import Checkpointer
from rl.training.config import TrainerConfig
from rl.training.engine import TrainingEngine
from rl.training.logprobs import linear_logprobs
from rl.training.micro_batches import balanced
from rl.types import Batch, Head
from tests.training.batches import (
    VOCAB_SIZE,
    broken,
    ragged_batch,
    with_mask,
    with_prompts,
    without_advantages,
)
from tests.training.layouts import LAYOUTS, Layout

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
MODELS = {"tied_fused": TIED_FUSED, "untied_split": UNTIED_SPLIT, "experts": EXPERTS}

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
    likely.
    """
    config = TrainerConfig(
        parallelism=(layout or Layout()).parallelism,
        training=TrainingConfig(mixed_precision_param=dtype, max_norm=max_norm),
        optimizer=default_adamw(lr=lr, weight_decay=decay),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=warmup, decay_ratio=0.0),
        **{"micro_batch_size": 2, **trainer},
    )
    engine = TrainingEngine(
        config, model, head=head, seed=0, steps=steps, folder=folder, loads=loads
    )
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return engine


def share(engine: TrainingEngine, batch: Batch) -> Batch:
    """The part of the batch that is the rank's own."""
    return batch.select(balanced(batch.lengths.tolist(), engine.dp_degree)[engine.dp_rank])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, gathered by torch itself."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in engine.model.named_parameters()}


def gradients_of(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """Return the whole gradients of trained parameters."""
    return {name: whole(p.grad) for name, p in engine.model.named_parameters() if p.requires_grad}


@torch.no_grad()
def logits_of(engine: TrainingEngine, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, L, V] of rows of one length: the model itself only ends in log-probs."""
    kept: list[torch.Tensor] = []
    handle = engine.model.norm.register_forward_hook(
        lambda module, given, hidden: kept.append(hidden)
    )
    lengths = torch.full((len(tokens),), tokens.shape[1] + 1)
    padded = torch.cat([tokens, tokens[:, :1]], dim=1).flatten()
    engine.config.micro_batch_size = len(tokens)
    engine.forward(Batch(tokens=padded, lengths=lengths, loss_weights=torch.ones(len(padded))))
    handle.remove()
    return kept[0][:, : tokens.shape[1]] @ whole(engine.model.lm_head.weight).T


def accumulate(
    engine: TrainingEngine, *batches: Batch, loss: PolicyLoss.Config = LOSS
) -> dict[str, Any]:
    """Gradients of ``batches``, one call each, what the calls returned, and what a step makes of
    it.
    """
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
    "by three": Cut(fields={"micro_batch_size": 3}),
    "all at once": Cut(fields={"micro_batch_size": 5}),
    "padded": Cut(fields={"micro_batch_size": 3, "packing": False}),
    "20 tokens": Cut(fields={"micro_batch_tokens": 20}),
    "32 tokens, padded": Cut(fields={"micro_batch_tokens": 32, "packing": False}),
    "two calls": Cut(
        (ragged_batch().select([0, 1]), ragged_batch().select([2, 3, 4])), loss=MEASURED
    ),
    "one row": Cut((ragged_batch().select([3]),)),
    "policy alone": Cut(loss=grpo()),
    "entropy alone": Cut((without_advantages(),), loss=grpo(entropy_coef=0.3)),
    "ratios of sequences": Cut(fields={"micro_batch_size": 3}, loss=BY_SEQUENCE),
    "KL alone": Cut((without_advantages(),), loss=grpo(kl_coef=0.3)),
    "sampling masks": Cut((with_mask(ragged_batch()),), fields={"micro_batch_size": 3}),
    "sampling masks, padded, two calls": Cut(
        (with_mask(ragged_batch()).select([3, 0]), with_mask(ragged_batch()).select([1, 2, 4])),
        fields={"micro_batch_size": 2, "packing": False},
    ),
    "shared prompts": Cut(
        (with_prompts(ragged_batch(SIBLINGS), [0, 0, 1, 0, 0]),),
        fields={"micro_batch_size": 5, "prompt_sharing": 3},
    ),
    "shared prompts, sampling masks, 32 tokens": Cut(
        (with_mask(with_prompts(ragged_batch(SIBLINGS), [0, 1, 1, 1, 0])),),
        fields={"micro_batch_tokens": 32, "prompt_sharing": 5},
    ),
}
KINDS = (
    "by two",
    "one row",
    "ratios of sequences",
    "sampling masks, padded, two calls",
    "shared prompts, sampling masks, 32 tokens",
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


def played(
    model: ModelConfig, layout: Layout, folder: str, cuts: Sequence[str] = tuple(CUTS)
) -> dict[str, Any]:
    """Return the values that the layout tests compare, with the gradients of ``cuts``."""
    still = engine_of(model, folder=folder, layout=layout, lr=0.0)
    result: dict[str, Any] = {
        "weights": weights_of(still),
        "dp": (still.dp_rank, still.dp_degree),
        "leader": still.is_leader,
        "cuts": {},
    }
    boxes = {name: shard.box for name, shard in still.shards().items()}
    result["share"] = balanced(ragged_batch().lengths.tolist(), still.dp_degree)[still.dp_rank]
    result["forward"] = still.forward(share(still, ragged_batch()), temperature=TEMPERATURE)
    result["moved_parts"] = [
        name for name, shard in still.shards().items() if shard.box != boxes[name]
    ]
    for name in cuts:
        cut = CUTS[name]
        cut_by(still, **cut.fields)
        result["cuts"][name] = accumulate(still, *cut.batches, loss=cut.loss)

    engine = engine_of(model, folder=folder, layout=layout, warmup=4)
    shards = engine.shards()  # before the first forward, as a publisher takes them
    steps = [learn(engine, ragged_batch(seed=1))]
    before = weights_of(engine)
    steps.append(learn(engine, broken(ragged_batch(), row=1)))
    after = weights_of(engine)
    result["skipping_changed"] = [
        name for name in before if not torch.equal(before[name], after[name])
    ]
    steps.append(learn(engine, ragged_batch(seed=2)))

    checkpointer = Checkpointer(engine, model, folder=folder)
    checkpointer.save(2, RUN_STATE)
    result |= {"saved": digests(engine.shards().values()), "drawn": torch.rand(4)}
    steps.append(learn(engine, ragged_batch(seed=3)))
    checkpointer.export_hf(f"{folder}/export")
    now = engine.shards()
    result["stale_parts"] = [
        name for name, shard in shards.items() if not torch.equal(shard.tensor, now[name].tensor)
    ]
    result |= {"steps": steps, "final": weights_of(engine)}
    checkpointer.close()
    return result


def held(model: ModelConfig, layout: Layout, folder: str, **trainer: Any) -> dict[str, Any]:
    """Return digests of a rank's weights, and the whole gradient of a batch of five rows and of one
    more.
    """
    engine = engine_of(model, folder=folder, layout=layout, **trainer)
    of_parts = digests(engine.shards().values())
    return {"digests": of_parts} | accumulate(engine, ragged_batch(), ragged_batch().select([3]))


def play(model: str, layout: str, folder: str, cuts: Sequence[str]) -> dict[str, Any]:
    """``played`` by name, on a rank of its own."""
    return played(MODELS[model], LAYOUTS[layout], folder, cuts)


def resumed(model: ModelConfig, layout: Layout, folder: str) -> dict[str, Any]:
    """Load the newest checkpoint in ``folder`` and take the step that ``played`` took after it."""
    engine = engine_of(model, folder=folder, layout=layout, warmup=4)
    checkpointer = Checkpointer(engine, model, folder=folder)
    state = checkpointer.load()
    result = {
        "run_state": state,
        "ignored": checkpointer.ignored,
        "loaded": (engine.version, engine.skipped_steps),
    }
    checkpointer.close()
    result |= {"weights": digests(engine.shards().values()), "drawn": torch.rand(4)}
    return result | {"step": learn(engine, ragged_batch(seed=3))}


def handed_over(model: str, layout: str, folder: str, weights: str) -> dict[str, Any]:
    """Digests of weights of version 1, which are then written to ``weights``."""
    engine = engine_of(MODELS[model], folder=folder, layout=LAYOUTS[layout])
    learn(engine, ragged_batch(seed=1))
    checkpointer = Checkpointer(engine, MODELS[model], folder=folder)
    for _ in range(2):  # the second in place of the first
        checkpointer.save_weights(Path(weights))
    checkpointer.close()
    return digests(engine.shards().values())


def adopted(folder: str, layout: Layout, export: str) -> dict[str, Any]:
    """Load a Hugging Face folder, compute the outputs of a batch, and export the folder again."""
    model = ModelConfig(hf_path=folder)
    engine = engine_of(model, folder=export, layout=layout)
    checkpointer = Checkpointer(engine, model, folder=export)
    state = checkpointer.load()
    outputs = engine.forward(share(engine, ragged_batch()))
    checkpointer.export_hf(export)
    checkpointer.close()
    shards = [shard.box.numel for shard in engine.shards().values()]
    return {"run_state": state, "outputs": outputs, "version": engine.version, "parts": shards}


def adopt(folder: str, layout: str, export: str) -> dict[str, Any]:
    """``adopted`` by name, on a rank of its own."""
    return adopted(folder, LAYOUTS[layout], export)


def sharded_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: dict[str, Any]
) -> list[torch.Tensor]:
    """Log-probs, entropy and the whole gradients of a sum of both, from weights split over the
    vocabulary.
    """
    init_device_mesh("cpu", (2,))
    mine = weight.chunk(2)[dist.get_rank()].requires_grad_()
    hidden.requires_grad_()
    values = linear_logprobs(
        hidden, mine, targets, vocab_size=len(weight), group=dist.group.WORLD, **options
    )
    weigh(*values).backward()
    dist.all_reduce(hidden.grad)
    shards = [None, None]
    dist.all_gather_object(shards, mine.grad)
    dist.destroy_process_group()
    return [value.detach() for value in values] + [hidden.grad, torch.cat(shards)]


def weigh(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """A sum in which each token's log-prob and entropy has a gradient of its own."""
    place = torch.arange(logprobs.numel()).view(logprobs.shape) + 1.0
    return (logprobs * place.sin() + entropy * place.cos()).sum()


def resume(model: str, layout: str, folder: str) -> dict[str, Any]:
    """``resumed`` by name, on a rank of its own."""
    return resumed(MODELS[model], LAYOUTS[layout], folder)
