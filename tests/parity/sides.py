"""Both sides of ``parity`` bitwise in processes of their own, with the same weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchtitan.config import TrainingConfig

from rl.algorithms.batch import make_batch
from rl.algorithms.losses import grpo
from rl.compat.torch_internals import local_tensor
from rl.model.shape import ModelConfig
from rl.training.engine import TrainingEngine
from rl.training.sharded_model import gradient_shards, named_weights, own_part
from rl.training.trainer_config import TrainerConfig
from rl.types import Batch, Completion, GenerationRequest, Rollout
from rl.types.sequences import SequenceLog
from tests.kit.generator_ranks import request
from tests.kit.layouts import LAYOUTS
from tests.kit.policies import Policy

SIZES = {
    "vocab_size": 96,
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 32,
    "max_seq_len": 640,
    "hidden_dim": 100,
}
MODELS = {
    "dense": ModelConfig(**SIZES),
    "split, untied": ModelConfig(**SIZES, fuse_qkv=False, tie_embeddings=False, float32_head=True),
    "biases": ModelConfig(**SIZES, family="tests.kit.seed_oss"),
    "experts": ModelConfig(
        **SIZES, num_experts=4, experts_per_token=2, moe_hidden_dim=40, expert_bias=True
    ),
    "windows, sinks, clamped experts": ModelConfig(
        **SIZES, num_experts=4, experts_per_token=2, moe_hidden_dim=40, family="gpt_oss"
    ),
    "norms of inputs and outputs, gelu": ModelConfig(**SIZES, family="gemma3_text"),
}
"""Models of all kinds of layers, by name."""


def weights_of(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Return random weights by name, all different from 0."""
    policy = Policy(model, seed)
    for name, parameter in policy.weights.items():
        if not parameter.any():
            parameter.normal_(std=0.3)
        if name.endswith("sinks"):
            parameter.normal_()
    return policy.weights


def answers(engine, waves: Sequence[Sequence[GenerationRequest]], steps: int) -> list[Completion]:
    """Return the completions of all ``waves``, which begin ``steps`` engine steps apart."""
    done: dict[str, Completion] = {}
    for wave in waves:
        for each in wave:
            engine.add(each)
        for _ in range(steps):
            done.update(engine.step())
    requests = [each for wave in waves for each in wave]
    while engine.busy:
        done.update(engine.step())
    return [done[each.request_id] for each in requests]


def swapped(
    engine, requests: Sequence[GenerationRequest], weights: dict[str, torch.Tensor], steps: int
) -> list[Completion]:
    """Return completions in which the tokens after ``steps`` steps are of version 1."""
    done: dict[str, Completion] = {}
    for each in requests:
        engine.add(each)
    for _ in range(steps):
        done.update(engine.step())
    load(engine, weights, version=1)
    while engine.busy:
        done.update(engine.step())
    return [done[each.request_id] for each in requests]


def load(engine, weights: dict[str, torch.Tensor], version: int) -> None:
    """Make ``weights`` those of a generator."""
    for shard in engine.parameters():
        shard.tensor.copy_(weights[shard.name])
    engine.weights_changed(version)


def batch_of(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> Batch:
    """Return the completions as a batch; a prompt that continues an earlier answer is its turn."""
    log = SequenceLog()
    for each, completion in zip(requests, completions, strict=True):
        log.add(each.prompt_tokens, completion)
    given: Any = {"prompt": None, "sample": 0, "text": "", "stop_reason": "length", "reward": 0.0}
    return make_batch([Rollout(sequences=(each.snapshot(),), **given) for each in log.sequences])


def scored(
    layout: str,
    model: ModelConfig,
    dtype: str,
    weights: dict[str, torch.Tensor],
    folder: str,
    calls: Sequence[tuple[Batch, float]],
    trainer: dict[str, Any],
) -> list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]:
    """Return log-probs of a forward pass and of a training pass, and the gradient, of each batch
    and temperature. ``trainer`` has fields of its config, and the engine's ``parity``.
    """
    parity = trainer.get("parity", "bitwise")
    usual = {"micro_batch_size": 3, "training": TrainingConfig(mixed_precision_param=dtype)}
    fields = usual | {name: each for name, each in trainer.items() if name != "parity"}
    config = TrainerConfig(parallelism=LAYOUTS[layout].parallelism, **fields)
    engine = TrainingEngine(config, model, seed=0, steps=9, folder=folder, parity=parity)
    with torch.no_grad():
        for name, parameter in named_weights(engine.model).items():
            local_tensor(parameter).copy_(own_part(parameter, weights[name]))
    results = []
    for batch, temperature in calls:
        rows = batch.shares(engine.dp_degree)[engine.dp_rank]
        mine = batch.select(rows)
        mine.columns["advantages"] = torch.linspace(-1, 1, len(mine.tokens))
        seen = engine.forward(mine, temperature=temperature)["logprobs"]
        loss = grpo().build()
        trained, _ = engine.forward_backward(mine, loss, temperature=temperature)
        shards = gradient_shards(engine.model)
        gradient = {name: each.tensor.float().clone() for name, each in shards.items()}
        engine.reset_optimizer()
        results.append((mine, seen, trained["logprobs"], gradient))
    engine.close()
    return results


def differing(batch: Batch, logprobs: torch.Tensor, version: int = 0) -> int:
    """Return the number of sampled tokens of ``version`` with other bits than the generator's."""
    counts = (batch.loss_weights > 0) & (batch.columns["versions"] == version)
    assert counts.any()
    return int((logprobs[counts] != batch.columns["behaviour_logprobs"][counts]).sum())


def prompt_of(length: int, rng: np.random.Generator) -> list[int]:
    """Return random ids."""
    return rng.integers(0, SIZES["vocab_size"], length).tolist()


def requests_of(
    name: str, lengths: Sequence[int], tokens: int, rng: np.random.Generator, **sampling: object
) -> list[GenerationRequest]:
    """Return requests with prompts of these ``lengths``."""
    return [
        request(f"{name}-{i}", prompt_of(n, rng), seed=i, max_tokens=tokens, **sampling)
        for i, n in enumerate(lengths)
    ]
