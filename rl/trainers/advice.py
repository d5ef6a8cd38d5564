"""Causes of failures that are known by the types of exceptions, and what to do after each."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import OutOfMemoryError

from rl.config import RLConfig
from rl.config.users_code import is_users, place_of
from rl.errors import (
    TOO_MANY_FILES,
    ActorFailure,
    AlarmRaised,
    GradientNotFinite,
    GroupLost,
    NodeLost,
    NothingLearned,
    StorageFull,
    UserCodeFailed,
    is_full,
    type_of,
)
from rl.trainers.run_folder import RunFolder

BY_TYPE: dict[type[BaseException], str] = {
    OutOfMemoryError: "device memory",
    MemoryError: "host memory",
    GradientNotFinite: "gradient",
    StorageFull: "full disk",
    NodeLost: "lost node",
    GroupLost: "task",
    AlarmRaised: "alarm",
    NothingLearned: "nothing learned",
    UserCodeFailed: "your code",
}
"""Cause by type of exception. Other causes are found by more than the type."""

FEWEST_KEPT = 2
"""Lowest number of checkpoints that a run can keep."""

NOTHING_LEARNED = (
    "every gradient was 0 or not finite, the learning rate was 0, or bfloat16 parameters rounded "
    "every update away; see trainer/grad_norm and trainer/skipped_steps in metrics.jsonl. If "
    "reward/zero_std_groups is 1 there, all completions of a prompt had equal rewards: start from "
    "a model that succeeds at times, or reward a part of the task"
)


SENTENCES: dict[str, tuple[str, ...]] = {
    "alarm": (
        "Look at the curves: python -m rl.view {folder}",
        "If the condition is harmless here, set watchdog.{known.condition} to 'warn'.",
    ),
    "gradient": (
        "Lower the learning rate trainer.optimizer.param_groups.0.optimizer_kwargs.lr (now {lr}), "
        "or fix the loss if the first step already failed.",
        "Try another rate on the same batches: python -m rl.replay {folder} --failed --lr 1e-7",
    ),
    "lost node": ("Start the run on other nodes; a launcher does so by itself.",),
    "lost process": (
        "Read {folder}/logs/{process.log}: the process ended without an exception. If the log ends "
        "in the middle of work, see whether the kernel or a scheduler ended it: dmesg -T",
        "If it is lost only now and then, raise max_restarts (now {run.config.max_restarts}).",
    ),
    "nothing learned": ("Look at the gradient norms and rewards: python -m rl.view {folder}",),
    "open files": (
        "Raise the number of files that a process may open, ulimit -Hn, or lower the number of "
        "episodes at once, rollout.prompts_per_step times rollout.samples_per_prompt, and close "
        "connections that nothing uses.",
    ),
    "unknown": ("Read 'detail' in {run.record.failure_path}, and the logs in {folder}/logs.",),
    "your code": ("Correct your code at {place}.",),
}
"""Sentences that say what to do, by cause. Those of other causes depend on the failure."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """Call that ended a run, for ``python -m rl.replay RUN --failed``."""

    call: Literal["step", "reward", ""] = ""
    """``step``: the calls of a step. ``reward``: the reward of one group. Empty: a call that cannot
    be made again alone."""
    why_not: str = ""
    """Sentence that says why the call cannot be made again, and what can be done."""

    @classmethod
    def outside_steps(cls, error: BaseException, step: int, saved: int = 0) -> "FailedCall":
        """Return the call that raised ``error`` after ``step``, outside the calls of a step.
        ``saved`` is the step of the newest checkpoint.
        """
        if isinstance(error, AlarmRaised | NothingLearned):
            why_not = "No call failed: a check of the metrics ended the run"
            last = f"; python -m rl.replay RUN --step {step} trains the last step again"
            return cls(why_not=f"{why_not}{last if step else ''}.")
        if lost_group(error) is not None:
            play = "--run RUN --prompt N runs one with the policy of the newest checkpoint"
            if not saved:
                play = "--config RUN/config.json --prompt N runs one with answers that you type"
            why_not = "An episode cannot be run again without a policy"
            return cls(why_not=f"{why_not}; python -m rl.play {play}.")
        if isinstance(error, ActorFailure):
            return cls(
                why_not=f"The call {error.call} of {error.actor} cannot be made again alone, since "
                "what it received is not kept; a resumed run makes it again."
            )
        return cls(
            why_not="The failing call is not one of a step, so it cannot be made again alone; a "
            "resumed run makes it again."
        )


def lost_group(error: BaseException | None) -> GroupLost | None:
    """Return the loss of a group that caused ``error``; None without one."""
    while error is not None and not isinstance(error, GroupLost):
        error = error.__cause__
    return error


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Exception that ended a run, and what its type says."""

    error: BaseException
    known: BaseException
    """Exception of the chain of causes that the cause was found by."""
    process: ActorFailure | None
    """Failure of a process in the chain of causes, if there is one."""
    run: RunFolder
    folder: str
    """Run folder, for a command."""


def advice_after(error: BaseException, run: RunFolder, call: FailedCall) -> tuple[str, list[str]]:
    """Return the cause of ``error``, and sentences that say what to do; the last one has the
    command that resumes the run.
    """
    links = [error]
    while (link := links[-1].__cause__) is not None and link not in links:
        links.append(link)
    process = next((exception for exception in links if isinstance(exception, ActorFailure)), None)
    cause, known = _cause_of(links, run)
    folder = shlex.quote(str(run.folder))
    failure = Failure(error=error, known=known, process=process, run=run, folder=folder)
    lr = run.config.trainer.optimizer.param_groups[0].optimizer_kwargs.get("lr")
    words = {**vars(failure), "lr": lr, "place": place_of(error)}
    sentences = [sentence.format(**words) for sentence in SENTENCES.get(cause, ())]
    if cause in ADVICE:
        sentences = ADVICE[cause](failure)
    repeat = f"Find out whether the call fails again, alone: python -m rl.replay {folder} --failed"
    resume = run.how_to_go_on()
    return cause, [
        *sentences,
        repeat if call.call else call.why_not.replace("RUN", folder),
        f"See what is wrong with the host and the run folder: python -m rl.doctor {folder}",
        f"{resume[0].upper()}{resume[1:]}",
    ]


def _cause_of(links: list[BaseException], run: RunFolder) -> tuple[str, BaseException]:
    """Return the cause that ``links``, a chain of causes, names first, and the exception that names
    it.
    """
    for link in links:
        if TOO_MANY_FILES in (type_of(link), getattr(link, "kind", "")):
            return "open files", link
        for kind, cause in BY_TYPE.items():
            if isinstance(link, kind):
                return cause, link
        if is_full(link):
            return "full disk", link
        if isinstance(link, ActorFailure) and link.kind == "silent":
            return "deadline", link
        if isinstance(link, ActorFailure) and link.kind != "raised":
            return "host memory" if run.oom_kills() else "lost process", link
    return "your code" if is_users(links[0]) else "unknown", links[0]


def _device_memory(failure: Failure, cache: str = "gpu_memory_utilization") -> list[str]:
    if failure.process is not None and failure.process.actor.startswith("generator-"):
        config = failure.run.config
        section = f"{config.generator_section}generator"
        generator = config.session().generator
        assert generator is not None, "one of its ranks failed"
        remedy = (
            f"Lower {section}.{cache} (now {getattr(generator, cache):g}), or "
            f"{section}.max_running_requests."
        )
    else:
        trainer = failure.run.config.trainer
        size = "micro_batch_size" if trainer.micro_batch_tokens is None else "micro_batch_tokens"
        remedy = (
            f"Lower trainer.{size} (now {getattr(trainer, size)}) or trainer.logits_mib (now "
            f"{trainer.logits_mib}), or give trainer.activation-checkpoint:full; they change "
            "results by rounding at most."
        )
    path = shlex.quote(str(failure.run.folder / "config.json"))
    plan = f"See what each rank holds in memory: python -m rl.plan --config {path}"
    return [remedy, plan]


def _host_memory(failure: Failure) -> list[str]:
    killed = failure.run.oom_kills()
    ended = f" The kernel ended processes of this host for it during the run: {killed}."
    return [
        "The memory of the host was used up; give the run a host with more, or lower what it "
        f"holds.{ended if killed else ''}",
        *_device_memory(failure, "kv_cache_gib"),
    ]


def _deadline(failure: Failure) -> list[str]:
    process = failure.process
    assert process is not None, "a deadline is one of a process"
    deadlines = failure.run.config.deadlines
    names = {"start": ["start"], "heartbeat": ["heartbeat", "start"]}.get(process.call, ["call"])
    now = " or ".join(f"deadlines.{name} (now {getattr(deadlines, name):g} s)" for name in names)
    return [
        f"Read {failure.folder}/logs/{process.log}: if the process was at work, raise {now}; if it "
        "waited, another process hangs."
    ]


def _full_disk(failure: Failure) -> list[str]:
    config = failure.run.config
    checkpoints = config.trainer.checkpoint.keep_latest_k
    lower = [f"set trainer.checkpoint.keep_latest_k to {FEWEST_KEPT} (now {checkpoints})"]
    if checkpoints == FEWEST_KEPT:
        lower = []
    if isinstance(config, RLConfig):
        lower += [f"lower record.max_gib (now {config.record.max_gib:g})"]
    less = f", or {' and '.join(lower)} to write less" if lower else ""
    return [f"Make room on the disk: df -h {failure.folder}{less}."]


def _task(failure: Failure) -> list[str]:
    lost = failure.known
    assert isinstance(lost, GroupLost), "a task costs groups"
    config = failure.run.config
    if lost.reason.endswith("hung"):
        limit = f"deadlines.reward (now {config.deadlines.reward:g} s)"
        advice = f"Make the task faster, or raise {limit} or the limits of its environment."
    elif lost.kind:
        advice = f"Correct the task at {place_of(failure.error)}."
    else:
        path = failure.run.record.failure_path
        advice = f"Correct the task; 'detail' in {path} has what it returned or how it ended."
    share = f" (now {config.rollout.max_lost:g})" if isinstance(config, RLConfig) else ""
    return [advice, f"If such groups may be lost, raise rollout.max_lost{share}."]


ADVICE: dict[str, Callable[[Failure], list[str]]] = {
    "deadline": _deadline,
    "device memory": _device_memory,
    "full disk": _full_disk,
    "host memory": _host_memory,
    "task": _task,
}
