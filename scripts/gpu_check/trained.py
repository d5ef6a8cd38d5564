"""Checks on sessions that take steps: turns on one device, graphs with changed weights.

On a GPU none of them has been run; with the stand-in device the same lines run on CPU.
"""

import subprocess

from rl.session.session import Session
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
