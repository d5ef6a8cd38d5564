"""Sides of the trainer's benchmark, which all take the same optimizer step."""

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import compute_logprobs
from torchtitan.components.optimizer import default_adamw
from torchtitan.distributed import utils as titan_dist
from torchtitan.models.qwen3 import Qwen3StateDictAdapter, parallelize_qwen3

from rl.algorithms.losses import grpo
from rl.host.platform import device_type
from rl.model.decoder import decoder_config
from rl.model.shape import ModelConfig, hf_config, shape_of
from rl.training.attention import attention_config, attention_masks
from rl.training.engine import TrainingEngine
from rl.training.trainer_config import TrainerConfig
from rl.types import Batch

CLIP = 0.2
MAX_NORM = 1.0
LR = 1e-4

Step = Callable[[], float]
"""Function that takes one optimizer step and returns the loss before the step."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model, and a batch of sequences of its maximum length, so that no side pads or packs."""

    model: ModelConfig
    sequences: int
    micro_batch_size: int
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further fields of the TrainerConfig."""
    others: tuple[str, ...] = ("bare",)
    """Names of the other sides."""
    prompt_tokens: int | None = None
    """Length of the prompts; None for a quarter of a sequence."""
    samples_per_prompt: int = 1
    """Number of sequences with the same prompt."""

    @property
    def tokens(self) -> int:
        return self.sequences * self.model.max_seq_len


def build(case: Case) -> tuple[TrainingEngine, dict[str, Step]]:
    """Return the engine, and all sides by name, with the same weights."""
    config = TrainerConfig(
        micro_batch_size=case.micro_batch_size,
        optimizer=default_adamw(lr=LR, fused=True),
        **case.trainer,
    )
    engine = TrainingEngine(config, case.model, seed=0, steps=1000, folder=tempfile.gettempdir())
    batch = make_batch(case)
    others = {"bare": bare, "transformers": transformers, "unshared": unshared}
    return engine, {
        "ours": ours(engine, batch),
        **{name: others[name](case, engine, batch) for name in case.others},
    }


def make_batch(case: Case) -> Batch:
    """Return random tokens. Some ratios are clipped."""
    draw = torch.Generator().manual_seed(0)
    count = case.sequences
    length = case.model.max_seq_len
    prompt = case.prompt_tokens or length // 4
    noise = 0.3 * torch.randn(case.tokens, generator=draw)
    tokens = torch.randint(case.model.vocab_size, (count, length), generator=draw)
    first_of_group = torch.arange(count) // case.samples_per_prompt * case.samples_per_prompt
    tokens[:, :prompt] = tokens[first_of_group, :prompt]
    return Batch(
        tokens=tokens.flatten(),
        lengths=torch.full((count,), length),
        loss_weights=(torch.arange(length) >= prompt).float().repeat(count),
        columns={
            "advantages": torch.randn(count, generator=draw).repeat_interleave(length),
            "behaviour_logprobs": noise - math.log(case.model.vocab_size),
        },
    )


def ours(engine: TrainingEngine, batch: Batch) -> Step:
    loss = grpo(clip_low=CLIP, clip_high=CLIP).build()

    def step() -> float:
        _, metrics = engine.forward_backward(batch, loss)
        engine.optim_step(max_norm=MAX_NORM)
        return metrics["loss/mean"]

    return step


def unshared(case: Case, engine: TrainingEngine, batch: Batch) -> Step:
    """Return our step with the prompt computed for every sequence."""
    config = dataclasses.replace(engine.config, prompt_sharing=1)
    folder = tempfile.gettempdir()
    return ours(TrainingEngine(config, case.model, seed=0, steps=1000, folder=folder), batch)


def bare(case: Case, engine: TrainingEngine, batch: Batch) -> Step:
    """Return a hand-written training step of torchtitan's Qwen3, parallelized by torchtitan."""
    config = engine.config
    attention = attention_config(case.model.attention)
    model_config = decoder_config(
        shape_of(case.model), fuse_qkv=case.model.fuse_qkv, inner_attention=attention
    )
    model_config.update_from_config(config=config)
    with torch.device("meta"):
        model = model_config.build()
    model = parallelize_qwen3(
        model,
        parallel_dims=engine.dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule) and device_type() == "cpu":
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=engine.device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.load_state_dict(engine.model.state_dict())

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return model(tokens, positions=positions, attention_masks=attention_masks(model, positions))

    clip = functools.partial(titan_dist.clip_grad_norm_, foreach=True)
    return by_hand(
        case,
        batch,
        logits,
        list(model.parameters()),
        config.optimizer.build(model_parts=[model]),
        clip,
    )


def transformers(case: Case, engine: TrainingEngine, batch: Batch) -> Step:
    """Return the same step of transformers' Qwen3 with PyTorch's AdamW."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(**hf_config(shape_of(case.model)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    weights = Qwen3StateDictAdapter(engine.model.config, None).to_hf(engine.model.state_dict())
    weights = {
        name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()
    }
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    (group,) = (group for optimizer in engine.optimizers for group in optimizer.param_groups)
    options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "fused")}
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens).logits

    return by_hand(
        case, batch, logits, list(model.parameters()), optimizer, torch.nn.utils.clip_grad_norm_
    )


def by_hand(
    case: Case,
    batch: Batch,
    logits: Callable[[torch.Tensor], torch.Tensor],
    parameters: list[torch.nn.Parameter],
    optimizer: Any,
    clip: Callable[[list[torch.nn.Parameter], float], Any],
) -> Step:
    """Return a plain PyTorch step for sequences of equal length."""
    columns = {"tokens": batch.tokens, "weights": batch.loss_weights, **batch.columns}
    device = parameters[0].device
    rows = {name: values.view(case.sequences, -1).to(device) for name, values in columns.items()}
    shards = [
        {name: values[first : first + case.micro_batch_size] for name, values in rows.items()}
        for first in range(0, case.sequences, case.micro_batch_size)
    ]
    total_weight = float(batch.loss_weights.sum())

    def step() -> float:
        total = torch.zeros((), device=device)
        for shard in shards:
            inputs = shard["tokens"][:, :-1]
            targets = shard["tokens"][:, 1:]
            weights, advantages, behaviour = (
                shard[name][:, 1:] for name in ("weights", "advantages", "behaviour_logprobs")
            )
            logprobs, _ = compute_logprobs(logits(inputs), targets, return_entropy=True)
            ratio = (logprobs - behaviour).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            loss = -(weights * gain).sum() / total_weight
            loss.backward()
            total += loss.detach()
        clip(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step
