"""Checks on sessions that take steps: graphs with changed weights, float8, speed of training.

On a GPU none of them has been run; with the stand-in device the same lines run on CPU.
"""

import subprocess
import time
from dataclasses import replace

import torch
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import FullAC

import rl
from rl.model.shape import shape_of
from rl.session.hardware import HardwareConfig
from rl.session.session import Session
from rl.session.session_config import Role
from rl.types import Batch
from scripts.gpu_check import verdicts
from scripts.gpu_check.sessions import gaps_of, judge_offload, sample, train
from scripts.gpu_check.setting import Setting, gpu_index
from scripts.gpu_check.verdicts import Verdict

LARGE_STEP = 1e-2
"""Learning rate of a step after which every log-prob is another one."""

QUERY = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
TOTAL = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")


def smi(*query: str) -> float:
    """Return the memory of the first GPU that nvidia-smi tells, in GiB."""
    command = ["nvidia-smi", f"--id={gpu_index()}", *query]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return verdicts.used_memory(done.stdout)


async def offload(setting: Setting, *, eager: bool = True) -> Verdict:
    """Have trainer and generator take turns on one device, the generator with CUDA graphs unless
    ``eager``.
    """
    generator = setting.generator(enforce_eager=eager)
    read = (lambda: smi(*QUERY)) if setting.cuda else None
    idle = smi(*QUERY) if setting.cuda else 0.0
    share = smi(*TOTAL) * generator.gpu_memory_utilization if setting.cuda else 0.0
    config = setting.session(trainer=setting.trainer(), generator=generator, colocate="all")
    async with Session(config, folder=setting.folder / "session") as session:
        return await judge_offload(session, setting, read, idle, share)


async def judge_graphs(session: Session, setting: Setting) -> Verdict:
    """Change the weights in place, far enough that other weights cannot pass for them."""
    before = await sample(session, setting)
    old, _ = await gaps_of(session, before)
    await train(session, before, lr=LARGE_STEP)
    await session.push()
    new, _ = await gaps_of(session, before)
    _, gaps = await gaps_of(session, await sample(session, setting))
    moved = float((new - old).abs().max())
    return verdicts.of_changed_weights(moved, gaps.tolist())


async def graphs(setting: Setting, *, dtype: str = "bfloat16") -> Verdict:
    """Generate with a compiled model and CUDA graphs, before and after a push."""
    generator = setting.generator(dtype, enforce_eager=False)
    config = setting.session(trainer=setting.trainer(dtype), generator=generator)
    async with Session(config, folder=setting.folder / "session") as session:
        return await judge_graphs(session, setting)


def random_batch(vocab_size: int, sequences: int, length: int) -> Batch:
    """Return random tokens, which a cross-entropy loss can learn."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (sequences * length,), generator=draw)
    weights = torch.ones(sequences, length)
    weights[:, 0] = 0
    lengths = torch.full((sequences,), length)
    return Batch(tokens=tokens, lengths=lengths, loss_weights=weights.flatten())


async def float8(setting: Setting) -> Verdict:
    """Compare float8 with bfloat16 on the same weights, and train on one batch."""
    if setting.cuda and not HardwareConfig().computes_float8:
        return Verdict(skipped="this GPU does not compute in float8")
    in_float8 = setting.trainer(float8=Float8LinearConverter.Config(emulate=not setting.cuda))
    plain = Role("roles.plain", setting.trainer(), setting.model())
    config = setting.session(
        trainer=in_float8, generator=None, roles={"plain": plain}, colocate="models"
    )
    vocab_size = shape_of(setting.model()).vocab_size
    batch = random_batch(vocab_size, setting.requests, setting.max_tokens)
    loss = rl.losses.CrossEntropyLoss.Config()
    async with Session(config, folder=setting.folder / "session") as session:
        await session.copy_weights("trainer", "plain", setting.folder / "weights")
        theirs = (await session.forward(batch, role="plain"))["logprobs"]
        ours = (await session.forward(batch))["logprobs"]
        losses = []
        for _ in range(4):
            _, metrics = await session.forward_backward(batch, loss)
            losses.append(metrics["loss/mean"])
            await session.optim_step(lr=1e-3)
    gaps = (ours - theirs).abs()[batch.loss_weights > 0]
    return verdicts.of_float8(gaps.tolist(), losses)


async def speed(setting: Setting, *, length: int, steps: int = 3) -> Verdict:
    """Train on 65,536 tokens a step, in sequences of ``length``; report tokens/s and MFU.

    Activations are recomputed, which MFU does not count as work.
    """
    tokens = 65_536
    if not setting.cuda:
        length, tokens = length // 1024, 256
    trainer = setting.trainer(activation_checkpoint=FullAC.Config(), micro_batch_tokens=length)
    model = replace(setting.model(longest=length), hf_path=None)  # for its length
    config = setting.session(model=model, trainer=trainer, generator=None)
    batch = random_batch(shape_of(model).vocab_size, tokens // length, length)
    peak = HardwareConfig().peak_tflops
    loss = rl.losses.CrossEntropyLoss.Config()
    seconds = []
    async with Session(config, folder=setting.folder / "session") as session:
        for _ in range(1 + steps):
            begin = time.perf_counter()
            await session.forward_backward(batch, loss)
            metrics = await session.optim_step(lr=1e-5)
            seconds.append(time.perf_counter() - begin)
    fastest = min(seconds[1:])  # the first step makes kernels
    numbers = {
        "tokens_per_s": tokens / fastest,
        "mfu": metrics["trainer/tflop"] / fastest / peak if peak else 0.0,
        "peak_gib": metrics["memory/peak"],
    }
    said = (
        f"{numbers['tokens_per_s']:,.0f} tokens/s, MFU {numbers['mfu']:.1%}, "
        f"{numbers['peak_gib']:.1f} GiB"
    )
    return Verdict(said=said, numbers=numbers)
