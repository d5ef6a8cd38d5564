"""Checks of one trainer rank against the CPU, for a host with torch and torchtitan alone.

The same weights, tokens and loss go through the trainer on the device of the checks and, in
float32, on the CPU. On a GPU none of them has been run; with the stand-in device the same lines run
on CPU.
"""

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

import rl
from rl.model.digest import digests
from rl.model.shape import ModelConfig, hf_config, shape_of
from rl.training.engine import TrainingEngine
from rl.training.trainer_config import TrainerConfig
from rl.types import Batch
from scripts.gpu_check import verdicts
from scripts.gpu_check.setting import Setting
from scripts.gpu_check.verdicts import Verdict

TEMPERATURE = 0.8
LIMIT_S = 900.0
"""Time after which the reference on the CPU is ended."""

SMALL: dict[str, Any] = {
    "vocab_size": 512, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16,
    "hidden_dim": 128, "max_seq_len": 1024,
}  # fmt: skip
ON_CUDA: dict[str, Any] = SMALL | {
    "vocab_size": 4096, "dim": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "head_dim": 64,
    "hidden_dim": 768,
}  # fmt: skip
# words of a variant after its dtype
MODELS: dict[str, dict[str, Any]] = {
    "experts": {"num_experts": 8, "experts_per_token": 2, "moe_hidden_dim": 128},
    "gpt_oss": {"family": "gpt_oss", "tie_embeddings": False},
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2"},
}
MODELS["gpt_oss"] |= MODELS["experts"]
COMPILED = {"compile": CompileConfig(enable=True)}
TRAINERS: dict[str, dict[str, Any]] = {
    "compiled": COMPILED,
    "recomputed": {"activation_checkpoint": FullAC.Config()},
    "selective": COMPILED | {"activation_checkpoint": SelectiveAC.Config()},
    "float8": {},
    "shared": {"prompt_sharing": 4},
    "chunked": {"logits_mib": 4},
    "lora": {"lora": LoRAConverter.Config(rank=8)},
}


class Step(NamedTuple):
    """Results of a trainer for one batch."""

    logprobs: torch.Tensor
    gradient: dict[str, torch.Tensor]
    counts: torch.Tensor
    """bool: tokens with a loss weight."""
    same_digests: bool
    """Whether the device and the host have equal digests of the weights after the step."""
    exact: torch.Tensor | None = None
    """Log-probs of transformers in float64."""


def become_rank() -> None:
    """Make this process the only rank of a trainer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def build(model: ModelConfig, folder: Path, **fields: Any) -> TrainingEngine:
    """Return the engine of a trainer of one rank."""
    become_rank()
    config = TrainerConfig(optimizer=default_adamw(lr=1e-3, weight_decay=0.1), **fields)
    return TrainingEngine(config, model, seed=0, steps=100, folder=str(folder))


def model_of(variant: str, *, large: bool) -> ModelConfig:
    """Return the model of a variant."""
    fields = dict(ON_CUDA if large else SMALL)
    for word in variant.split("-"):
        fields |= MODELS.get(word, {})
    return ModelConfig(**fields)


def engine_of(variant: str, model: ModelConfig, folder: Path) -> TrainingEngine:
    """Return the engine of a variant. Its weights are large, so that log-probs differ by token."""
    dtype, *words = variant.split("-")
    fields: dict[str, Any] = {"training": TrainingConfig(mixed_precision_param=dtype)}
    for word in words:
        fields |= TRAINERS.get(word, {})
    if "float8" in words:
        fields["float8"] = Float8LinearConverter.Config(emulate=not torch.cuda.is_available())
    engine = build(model, folder, micro_batch_tokens=2048, **fields)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            noise = 0.02 * torch.randn(local.shape, generator=draw).to(local)
            is_flat = local.ndim == 1 or name.endswith("lora_b.weight")
            local.copy_(local + noise if is_flat else 3.0 * local)
    return engine


def batch_of(vocab_size: int, longest: int) -> Batch:
    """Return 24 sequences of 65 to ``longest`` tokens in groups of four, which share a prompt."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(65, longest, (24,), generator=draw)
    total = int(lengths.sum())
    prompts = torch.randint(vocab_size, (6, 64), generator=draw)
    tokens = torch.randint(vocab_size, (total,), generator=draw)
    weights = torch.rand(total, generator=draw) + 0.5
    for row, start in enumerate((lengths.cumsum(0) - lengths).tolist()):
        tokens[start : start + 64] = prompts[row // 4]
        weights[start : start + 64] = 0.0
    noise = 0.1 * torch.randn(total, generator=draw) - 8.3
    advantages = torch.randn(24, generator=draw).repeat_interleave(lengths)
    columns = {"behaviour_logprobs": noise, "reference_logprobs": noise, "advantages": advantages}
    return Batch(tokens=tokens, lengths=lengths, loss_weights=weights, columns=columns)


def plain(tensor: Any) -> torch.Tensor:
    """Return a copy of a tensor or DTensor in float32 on the host."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().float().cpu().clone()


def take_step(variant: str, folder: Path, *, large: bool) -> Step:
    """Return what the trainer of a variant computes on the device of this process."""
    model = model_of(variant, large=large)
    engine = engine_of(variant, model, folder)
    batch = batch_of(shape_of(model).vocab_size, 900 if large else 120)
    loss = rl.losses.dapo(entropy_coef=0.02, kl_coef=0.05).build()
    exact = exact_logprobs(engine, model, batch) if variant == "float32-qwen3" else None
    outputs = engine.forward(batch, temperature=TEMPERATURE)
    engine.forward_backward(batch, loss, temperature=TEMPERATURE)
    gradient = dict[str, torch.Tensor]()

    def keep(shards: Any) -> None:
        gradient.update({name: plain(shard.tensor) for name, shard in shards.items()})

    engine.optim_step(max_norm=float("inf"), on_gradient=keep)
    trained = engine.trained_shards().values()
    hosts = [shard._replace(tensor=shard.tensor.cpu()) for shard in trained]
    same = digests(trained) == digests(hosts)
    engine.close()
    return Step(outputs["logprobs"].cpu(), gradient, batch.loss_weights > 0, same, exact)


def exact_logprobs(engine: TrainingEngine, model: ModelConfig, batch: Batch) -> torch.Tensor:
    """Return the log-probs of transformers' Qwen3 in float64 for the weights of ``engine``."""
    from torchtitan.models.qwen3 import Qwen3StateDictAdapter
    from transformers import AutoModelForCausalLM, Qwen3Config

    state = Qwen3StateDictAdapter(engine.model.config, None).to_hf(engine.model.state_dict())
    weights = {name: plain(tensor).double() for name, tensor in state.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    config = Qwen3Config(**hf_config(shape_of(model)))
    other = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    other.load_state_dict(weights, strict=False)
    other.to(engine.device).eval()
    found = []
    with torch.no_grad():
        for row in batch.tokens.split(batch.lengths.tolist()):
            logits = other(row[None].to(engine.device)).logits[0, :-1] / TEMPERATURE
            words = row[1:, None].to(engine.device)
            logprobs = logits.log_softmax(-1).gather(-1, words)[:, 0].cpu()
            found += [logprobs.new_zeros(1), logprobs]
    return torch.cat(found)


def reference(variant: str, setting: Setting) -> Step:
    """Return the step of a variant on the CPU, which all checks of a program share."""
    path = setting.folder.parent / f"reference-{variant}.pt"
    if not path.exists():
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        environment["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        command = [sys.executable, "-m", "scripts.gpu_check.engine", variant, setting.device, path]
        subprocess.run(command, env=environment, check=True, timeout=LIMIT_S)
    return Step(**torch.load(path))


async def parity(setting: Setting, *, variant: str) -> Verdict:
    """Compare one step of a variant with the CPU in float32."""
    dtype, *words = variant.split("-")
    if not setting.cuda and {"float8", "compiled"} <= {*words}:
        return Verdict(skipped="needs a GPU: emulated float8 is not compiled")
    models = [word for word in words if word in (*MODELS, "lora")]
    theirs = reference("-".join(["float32", *models]), setting)
    begin = time.perf_counter()
    ours = take_step(variant, setting.folder, large=setting.cuda)
    seconds = time.perf_counter() - begin
    gaps = (ours.logprobs - theirs.logprobs).abs()[ours.counts]
    distance = norm(ours.gradient[name] - theirs.gradient[name] for name in theirs.gradient)
    error = distance / norm(theirs.gradient.values())
    exact = None
    if ours.exact is not None:
        exact = (ours.logprobs - ours.exact).abs()[ours.counts].tolist()
    is_coarse = dtype == "bfloat16" and not {"float8", "experts", "gpt_oss"}.isdisjoint(words)
    kind = "coarse" if is_coarse else dtype
    verdict = verdicts.of_step(gaps.tolist(), error, kind, exact, ours.same_digests)
    if "float8" in words:
        plain_step = take_step("bfloat16", setting.folder, large=setting.cuda)
        if torch.equal(ours.logprobs, plain_step.logprobs):
            wrong = "log-probs are those of bfloat16, bit for bit: float8 is not used"
            verdict = replace(verdict, wrong=wrong)
    return replace(verdict, numbers=verdict.numbers | {"seconds": seconds})


def norm(tensors: Any) -> float:
    """Return the norm of all tensors together."""
    return sum(float(each.double().square().sum()) for each in tensors) ** 0.5


def main(variant: str, device: str, path: str) -> None:
    """Write the step of a variant with the sizes for ``device``, computed on this host's CPU."""
    step = take_step(variant, Path(path).parent, large=device == "cuda")
    torch.save(step._asdict(), f"{path}.part")
    Path(f"{path}.part").rename(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
