"""Checks on a session: log-probs, pushes, offloading.

On a GPU none of them has been run; with the stand-in device the same lines run on CPU.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torchtitan.models.common.attention import FlexAttention

import rl
from rl.compare.comparison import Comparison, Example, comparable
from rl.model.shape import shape_of
from rl.session.session import Session
from rl.training.attention import attention_config
from rl.types import Completion, GenerationRequest, Prompt, Rollout, Sampling
from rl.weights.transport import WeightPushConfig
from scripts.gpu_check import verdicts
from scripts.gpu_check.setting import Setting
from scripts.gpu_check.verdicts import Verdict

PROMPT_TOKENS = 40


async def sample(session: Session, setting: Setting, *, temperature: float = 1.0) -> list[Rollout]:
    """Return completions of random prompts, as rollouts."""
    vocab_size = shape_of(session.config.model).vocab_size
    draw = torch.Generator().manual_seed(0)
    sampling = Sampling(max_tokens=setting.max_tokens, temperature=temperature)
    tokens = torch.randint(vocab_size, (setting.requests, PROMPT_TOKENS), generator=draw).tolist()
    requests = [
        GenerationRequest(
            request_id=f"{temperature}/{session.version}/{number}",
            prompt_tokens=row,
            seed=number,
            sampling=sampling,
        )
        for number, row in enumerate(tokens)
    ]
    completions: list[Completion] = await session.sample(requests, alone=True)
    return [
        Rollout.single_turn(
            Prompt(prompt_id=number, tokens=row, text="", answer=""),
            completion,
            sample=0,
            text="",
            reward=0.0,
        )
        for number, (row, completion) in enumerate(zip(tokens, completions, strict=True))
    ]


async def gaps_of(
    session: Session, rollouts: list[Rollout], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the trainer's log-probs of sampled tokens, and their distance from the generator's."""
    batch = rl.make_batch(rollouts)
    outputs = await session.forward(batch, temperature=temperature)
    sampled = batch.loss_weights > 0
    theirs = batch.columns["behaviour_logprobs"][sampled]
    ours = outputs["logprobs"][sampled]
    return ours, (ours - theirs).abs()


async def train(session: Session, rollouts: list[Rollout], lr: float = 1e-4) -> None:
    """Take one optimizer step, which makes half of the rollouts likelier."""
    advantages = torch.ones(len(rollouts))
    advantages[::2] = -1.0
    batch = rl.make_batch(rollouts, advantages)
    await session.forward_backward(batch, rl.losses.grpo())
    await session.optim_step(lr=lr)


async def judge_parity(session: Session, setting: Setting, temperature: float = 1.0) -> Verdict:
    """Compare the trainer at ``temperature`` with the generator, which samples at 1, before a step
    and after it.
    """
    await train(session, await sample(session, setting))
    await session.push()
    rollouts = await sample(session, setting)
    ours, gaps = await gaps_of(session, rollouts, temperature)
    ends = np.cumsum([rollout.sampled_count for rollout in rollouts])
    number = int(np.searchsorted(ends, int(gaps.argmax()), side="right"))
    (sequence,) = rollouts[number].sequences
    trained = np.full(len(sequence), np.nan, dtype=np.float32)
    begin = ends[number] - rollouts[number].sampled_count
    trained[sequence.sampled] = ours[begin : ends[number]].numpy()
    worst = Example(rollout=rollouts[number], number=number, sequence=sequence, trained=trained)
    compared = await Comparison(session, worst, temperature=temperature).compare()
    findings = [f"{each.kind} {each.module}: {each.text}" for each in compared.findings]
    generator = session.config.generator
    assert generator is not None
    return verdicts.of_parity(gaps.tolist(), generator.dtype, findings)


async def parity(
    setting: Setting, *, dtype: str, attention: str, fsdp: int = 1, tp: int = 1
) -> Verdict:
    """Compare log-probs and modules of trainer and generator."""
    if attention == "varlen":
        if not setting.cuda:
            return Verdict(skipped="needs a GPU")
        if isinstance(attention_config("auto"), FlexAttention.Config):
            return Verdict(skipped="needs the FlashAttention package of this GPU")
    trainer = setting.trainer(dtype)
    trainer.parallelism.data_parallel_shard_degree = fsdp
    config = setting.session(
        model=setting.model(attention),
        trainer=trainer,
        generator=setting.generator(dtype, tensor_parallel_degree=tp),
    )
    async with Session(comparable(config), folder=setting.folder / "session") as session:
        return await judge_parity(session, setting)


async def judge_push(session: Session, setting: Setting, rounds: int = 3) -> Verdict:
    """Push ``rounds`` versions; the session compares digests and log-probs after each."""
    seconds = []
    for _ in range(rounds):
        await train(session, await sample(session, setting))
        begin = time.perf_counter()
        await session.push()
        seconds.append(time.perf_counter() - begin)
    size = session.push_metrics["push/bytes"]
    return verdicts.of_push(await session.differing_weights(), seconds, size)


async def push(setting: Setting, *, transport: str) -> Verdict:
    """Push weights by ``transport``."""
    if transport == "cuda_ipc" and not setting.cuda:
        return Verdict(skipped="needs a GPU")
    config = setting.session(
        trainer=setting.trainer(),
        generator=setting.generator(),
        weights=WeightPushConfig(transport=transport, digests=True),  # type: ignore[arg-type]
    )
    async with Session(config, folder=setting.folder / "session") as session:
        return await judge_push(session, setting)


async def judge_offload(
    session: Session, setting: Setting, read: Callable[[], float] | None, idle: float, share: float
) -> Verdict:
    """Give the device to the generator, the trainer and the generator again.

    ``read`` returns the used memory of the GPU in GiB; ``share`` is the generator's part of it.
    """
    await train(session, await sample(session, setting))
    await session.push()
    before = await sample(session, setting)
    generator = read() if read else 0.0
    _, gaps = await gaps_of(session, before)
    trainer = read() if read else 0.0
    # the generator has its memory again, with the same weights and an empty cache
    _, again = await gaps_of(session, await sample(session, setting))
    dtype = session.config.generator.dtype if session.config.generator else ""
    verdict = verdicts.of_parity([*gaps.tolist(), *again.tolist()], dtype, [])
    if read is None:
        return replace(verdict, said=f"{verdict.said}; memory not read: needs a GPU")
    # weights, gradients and two states of Adam in float32
    sizes = {"generator": share, "trainer": 16 * parameters(session) / 2**30}
    readings = {"idle": idle, "generator": generator, "trainer": trainer}
    memory = verdicts.of_memory(readings, sizes)
    return Verdict(
        wrong="; ".join(each.wrong for each in (verdict, memory) if each.wrong),
        said=f"{verdict.said}; {memory.said}",
        numbers=verdict.numbers | memory.numbers,
    )


def parameters(session: Session) -> int:
    """Return the number of parameters of a dense model, without its norms."""
    shape = shape_of(session.config.model)
    attention = shape.dim * shape.head_dim * 2 * (shape.n_heads + shape.n_kv_heads)
    layer = attention + 3 * shape.dim * shape.hidden_dim
    return shape.vocab_size * shape.dim + shape.n_layers * layer
