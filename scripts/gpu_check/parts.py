"""Checks of the parts of one trainer rank, for a host with torch and torchtitan alone.

On a GPU none of them has been run; with the stand-in device the same lines run on CPU.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

import configs.qwen3
import rl
from rl.model.digest import digests
from rl.model.shape import ModelConfig, shape_of
from rl.model.shards import Shard, layout_of
from rl.plan.peak_memory import MemoryOfPasses
from rl.plan.planned_run import PlannedRun
from rl.session.hardware import HardwareConfig
from rl.training.checkpoint import Checkpointer
from rl.training.engine import TrainingEngine
from rl.training.logprobs import linear_logprobs
from rl.training.trainer_config import TrainerConfig
from rl.types import Batch
from rl.weights.transport import Transfer, open_publisher, open_subscriber
from scripts.gpu_check import verdicts
from scripts.gpu_check.engine import build
from scripts.gpu_check.setting import TINY, Setting
from scripts.gpu_check.verdicts import Verdict

BFLOAT16 = {"training": TrainingConfig(mixed_precision_param="bfloat16")}
COMPILED = {"compile": CompileConfig(enable=True)}
CASES: dict[str, dict[str, Any]] = {
    "0_6b": COMPILED,
    "1_7b": COMPILED,
    "8b": COMPILED | {"activation_checkpoint": SelectiveAC.Config()},
    "16k": COMPILED | {"activation_checkpoint": FullAC.Config()},
}
LAYERS_OF_8B = 8


def wait(setting: Setting) -> None:
    """Wait until the device is idle."""
    if setting.cuda:
        torch.cuda.synchronize()


def random_batch(vocab_size: int, lengths: list[int]) -> Batch:
    """Return random tokens, which a cross-entropy loss can learn."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.tensor(lengths)
    weights = torch.ones(sum(lengths))
    weights[sizes.cumsum(0) - sizes] = 0
    tokens = torch.randint(vocab_size, (sum(lengths),), generator=draw)
    return Batch(tokens=tokens, lengths=sizes, loss_weights=weights)


@contextmanager
def stepping(setting: Setting) -> Iterator[tuple[TrainingEngine, Callable[[], None]]]:
    """Yield an engine in bfloat16, and a function that takes a step on a batch."""
    model = setting.model(longest=1024)
    engine = build(model, setting.folder, micro_batch_tokens=2048, **BFLOAT16)
    scale = 1 if setting.cuda else 8
    batch = random_batch(shape_of(model).vocab_size, [700 // scale, 600 // scale, 300 // scale])
    loss = rl.losses.CrossEntropyLoss.Config().build()

    def step() -> None:
        engine.forward_backward(batch, loss)
        engine.optim_step()

    yield engine, step
    engine.close()


async def head(setting: Setting) -> Verdict:
    """Compare the head of log-probs with all logits at once: gradients, seconds and peak memory."""
    tokens, width, words = (8192, 1024, 151_936) if setting.cuda else (256, 32, 1024)
    device = setting.device
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(words, width, device=device, dtype=torch.bfloat16) * width**-0.5
    targets = torch.randint(words, (tokens,), device=device)
    numbers = dict[str, float]()
    gradients = {}
    for name in ("ours", "naive"):
        inputs = [each.clone().requires_grad_() for each in (hidden, weight)]
        if setting.cuda:
            torch.cuda.reset_peak_memory_stats()
        wait(setting)
        begin = time.perf_counter()
        if name == "ours":
            chunk = max(1, (TrainerConfig().logits_mib << 20) // (4 * words))
            logprobs, entropy = linear_logprobs(*inputs, targets, chunk_tokens=chunk)
        else:
            every = torch.log_softmax((inputs[0] @ inputs[1].T).float(), -1)
            logprobs = every.gather(-1, targets[:, None])[:, 0]
            entropy = -(every.exp() * every).sum(-1)
            del every
        (logprobs.sum() + 0.01 * entropy.sum()).backward()
        wait(setting)
        numbers[f"{name}_s"] = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() if setting.cuda else 0
        numbers[f"{name}_peak_gib"] = peak / 2**30
        gradients[name] = [each.grad.float().cpu() for each in inputs if each.grad is not None]
        del inputs, logprobs, entropy
    pairs = list(zip(gradients["ours"], gradients["naive"], strict=True))
    error = max(float((ours - naive).norm() / naive.norm()) for ours, naive in pairs)
    numbers["gradient_error"] = error
    wrong = ""
    if not error <= verdicts.STEP_BOUNDS["bfloat16"][1]:
        wrong = f"the gradient of the head differs by {error:.2g} of its norm from plain PyTorch's"
    elif setting.cuda and numbers["ours_peak_gib"] * 2 > numbers["naive_peak_gib"]:
        wrong = "the head needs more than half of the memory of all logits at once"
    said = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
    return Verdict(wrong=wrong, said=said, numbers=numbers)


async def offload(setting: Setting) -> Verdict:
    """Move a trainer to the host and back: bits, seconds, memory."""
    used = torch.cuda.memory_reserved if setting.cuda else lambda: 0
    with stepping(setting) as (engine, step):
        step()
        before = digests(engine.shards().values())
        resident = used()
        begin = time.perf_counter()
        engine.offload()
        wait(setting)
        out = time.perf_counter() - begin
        away = used()
        begin = time.perf_counter()
        engine.onload()
        wait(setting)
        back = time.perf_counter() - begin
        same = digests(engine.shards().values()) == before
        step()
    wrong = "" if same else "the weights are others after offload and onload"
    if setting.cuda and away * 10 > resident:
        wrong = f"{away / 2**30:.1f} of {resident / 2**30:.1f} GiB stay on the device"
    numbers = {"offload_s": out, "onload_s": back}
    numbers |= {"resident_gib": resident / 2**30, "away_gib": away / 2**30}
    return Verdict(wrong=wrong, said=f"out {out:.2f} s, back {back:.2f} s", numbers=numbers)


async def checkpoint(setting: Setting) -> Verdict:
    """Save in the background, take a step, load, and compare every weight."""
    with stepping(setting) as (engine, step):
        mode = "async_with_pinned_mem" if setting.cuda else "async"
        engine.config.checkpoint = replace(engine.config.checkpoint, async_mode=mode)
        saved = Checkpointer(engine, setting.model(), folder=str(setting.folder / "weights"))
        step()
        before = digests(engine.shards().values())
        begin = time.perf_counter()
        saved.save(1, {"step": 1})
        saved.wait_for_staging()
        staged = time.perf_counter() - begin
        step()
        moved = digests(engine.shards().values()) != before
        begin = time.perf_counter()
        saved.load()
        loaded = time.perf_counter() - begin
        same = digests(engine.shards().values()) == before
        saved.close()
    wrong = "" if moved and same else "the loaded weights are not those that were saved"
    numbers = {"staged_s": staged, "load_s": loaded}
    said = f"staged in {staged:.2f} s, loaded in {loaded:.2f} s"
    return Verdict(wrong=wrong, said=said, numbers=numbers)


def read_pushes(pipe: Any, device: str) -> None:
    """Pull the versions that ``pipe`` names, as a generator does; answer with their digests."""
    transfer, addresses, layout = pipe.recv()
    empty = [
        torch.full(region.box.shape, float("nan"), dtype=transfer.dtype, device=device)
        for region in layout
    ]
    shards = [Shard(region, tensor) for region, tensor in zip(layout, empty, strict=True)]
    subscriber = open_subscriber(transfer, addresses, shards, generator=0, rank=0)
    pipe.send("ready")
    while (version := pipe.recv()) is not None:
        begin = time.perf_counter()
        asyncio.run(subscriber.fetch(version))
        subscriber.pull(version)
        pipe.send((time.perf_counter() - begin, digests(shards)))
    subscriber.close()


async def push(setting: Setting, *, transport: str) -> Verdict:
    """Push three versions to another process by ``transport``; compare digests."""
    if transport == "cuda_ipc" and not setting.cuda:
        return Verdict(skipped="needs a GPU")
    context = multiprocessing.get_context("spawn")
    seconds = []
    differing = list[str]()
    with stepping(setting) as (engine, step):
        shards = [*engine.shards().values()]
        layout = layout_of(shards)
        transfer = Transfer(transport, torch.bfloat16, (layout,), (layout,))
        publisher = open_publisher(transfer, shards, rank=0)
        pipe, theirs = context.Pipe()
        reader = context.Process(target=read_pushes, args=(theirs, setting.device), daemon=True)
        reader.start()
        pipe.send((transfer, [publisher.address], layout))
        pipe.recv()
        for version in range(3):
            step()
            wait(setting)
            begin = time.perf_counter()
            await publisher.publish(version)
            published = time.perf_counter() - begin
            pipe.send(version)
            pulled, found = await asyncio.to_thread(pipe.recv)
            seconds.append(published + pulled)
            ours = digests(shards, dtype=torch.bfloat16)
            differing += [name for name, digest in ours.items() if found[name] != digest]
        pipe.send(None)
        reader.join()
        publisher.close()
    return verdicts.of_push(differing, seconds, transfer.nbytes)


async def widths(setting: Setting, *, tune: bool) -> Verdict:
    """Take two passes at each width of rows: the first one compiles attention's graphs."""
    limit = 8192 if setting.cuda else 256
    model = setting.model("flex" if setting.cuda else "auto", longest=limit)
    fields = {"micro_batch_tokens": limit, "tune_attention": tune}
    engine = build(model, setting.folder, **fields, **BFLOAT16)
    loss = rl.losses.CrossEntropyLoss.Config().build()
    numbers = dict[str, float]()
    for quarter in (1, 2, 3, 4):
        cells = limit * quarter // 4
        batch = random_batch(shape_of(model).vocab_size, [cells // 2 - 3, cells // 4, cells // 8])
        for name in ("first", "second"):
            begin = time.perf_counter()
            engine.forward_backward(batch, loss)
            wait(setting)
            numbers[f"{name}_{cells}_s"] = time.perf_counter() - begin
    engine.close()
    said = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
    return Verdict(said=said, numbers=numbers)


async def speed(setting: Setting, *, case: str) -> Verdict:
    """Train with the sizes of a recipe: tokens/s, MFU, and peak memory beside the plan's."""
    length = 16_384 if case == "16k" else 4096
    tokens = max(length, 8192)
    size = "0_6b" if case == "16k" else case
    config = getattr(configs.qwen3, f"qwen3_{size}")()
    fields = CASES[case] | BFLOAT16
    if not setting.cuda:
        length, tokens, fields = 64, 128, BFLOAT16
    model: ModelConfig = replace(config.model if setting.cuda else TINY, max_seq_len=length)
    if size == "8b" and setting.cuda:
        model = replace(model, n_layers=LAYERS_OF_8B)
    config.model = model
    config.trainer = TrainerConfig(micro_batch_tokens=tokens, **fields)
    config.generator.replicas = 1
    config.rollout.max_tokens = length // 2
    config.task = replace(config.task, max_prompt_tokens=length // 2)
    passes = MemoryOfPasses(PlannedRun(config), "trainer").peak().total
    engine = build(model, setting.folder, micro_batch_tokens=tokens, **fields)
    count = sum(parameter.numel() for parameter in engine.model.parameters())
    batch = random_batch(shape_of(model).vocab_size, [length] * (4 * tokens // length))
    loss = rl.losses.CrossEntropyLoss.Config().build()
    seconds = []
    for _ in range(4):
        if setting.cuda:
            torch.cuda.reset_peak_memory_stats()
        wait(setting)
        begin = time.perf_counter()
        engine.work.take()
        engine.forward_backward(batch, loss)
        engine.optim_step()
        wait(setting)
        seconds.append(time.perf_counter() - begin)
    work = engine.work.take() or 0.0
    engine.close()
    fastest = min(seconds[1:])  # the first step compiles
    peak_tflops = HardwareConfig().peak_tflops
    numbers = {
        "tokens_per_s": 4 * tokens / fastest,
        "mfu": work / fastest / peak_tflops / 1e12 if peak_tflops else 0.0,
        "first_step_s": seconds[0],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if setting.cuda else 0.0,
        "planned_gib": (16 * count + passes) / 2**30,
    }
    said = (
        f"{numbers['tokens_per_s']:,.0f} tokens/s, MFU {numbers['mfu']:.1%}, "
        f"{numbers['peak_gib']:.1f} GiB, {numbers['planned_gib']:.1f} planned"
    )
    return Verdict(said=said, numbers=numbers)
