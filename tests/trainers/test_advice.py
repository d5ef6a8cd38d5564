"""Advice after a failure: its cause by type, the field or line to change, and commands."""

import errno
import os
import re
import shlex

import pytest
from torch import OutOfMemoryError

from rl.cli.arguments import find_config
from rl.config import SampledEvaluationConfig
from rl.config.frozen import frozen
from rl.errors import (
    TOO_MANY_FILES,
    ActorFailure,
    AlarmRaised,
    GradientNotFinite,
    GroupLost,
    NodeLost,
    NothingLearned,
    RankLost,
    RunError,
    UserCodeFailed,
)
from rl.observe.progress import Progress
from rl.observe.record import RunRecord, failing_loudly
from rl.trainers import advice, run_folder
from rl.trainers.advice import FailedCall, advice_after
from rl.trainers.run_folder import RunFolder
from tests.kit.commands import check_command


@pytest.fixture
def run(tmp_path):
    config = find_config("quickstart")()
    record = RunRecord(tmp_path / "run")
    record.write_json(
        "config.json", {"name": "quickstart", "command": "train", "config": frozen(config)}
    )
    return RunFolder(config, record, Progress(1, quiet=True, log=record.run_log), command="train")


def of_process(kind="raised", *, actor="trainer", call="forward_backward", cause=None):
    """Return the failure of a process, with the exception that the process raised."""
    failure = ActorFailure if kind == "raised" else RankLost
    error = failure(f"{actor} rank 0, {call}: it failed", actor=actor, rank=0, call=call, kind=kind)
    error.__cause__ = cause
    return error


def caused_by(cause):
    error = RunError("3 of the last 4 groups were lost")
    error.__cause__ = cause
    return error


def full_disk():
    try:
        with failing_loudly("metrics.jsonl"):
            raise OSError(errno.ENOSPC, "No space left on device")
    except RunError as error:
        return error


@pytest.mark.parametrize(
    ("error", "cause", "said"),
    [
        (of_process(cause=OutOfMemoryError("out")), "device memory", "trainer.micro_batch_size"),
        (
            of_process(actor="generator-1", call="generate", cause=OutOfMemoryError("out")),
            "device memory",
            "generator.gpu_memory_utilization (now 0.5)",
        ),
        (of_process(cause=MemoryError()), "host memory", "python -m rl.plan --config "),
        (of_process(cause=MemoryError()), "host memory", "Lower trainer.micro_batch_size"),
        (
            of_process(actor="generator-0", call="generate", cause=MemoryError()),
            "host memory",
            "generator.kv_cache_gib (now 0.125)",
        ),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "open files", "ulimit -Hn"),
        (caused_by(GroupLost("reward raised", "x", TOO_MANY_FILES)), "open files", "-Hn"),
        (of_process(cause=GradientNotFinite("nan")), "gradient", "--failed --lr"),
        (of_process("silent"), "deadline", "raise deadlines.call (now 600 s)"),
        (of_process("silent", call="heartbeat"), "deadline", "deadlines.heartbeat (now 60 s)"),
        (of_process("silent", call="start"), "deadline", "deadlines.start (now 600 s)"),
        (of_process("died"), "lost process", "max_restarts (now 3)"),
        (
            caused_by(of_process("died", actor="generator-0")),
            "lost process",
            "logs/generator-0-0.log",
        ),
        (full_disk(), "full disk", "record.max_gib (now 10)"),
        (of_process(cause=OSError(errno.EDQUOT, "quota")), "full disk", "df -h "),
        (NodeLost("node-1"), "lost node", "other nodes"),
        (caused_by(GroupLost("reward hung", "x")), "task", "deadlines.reward (now 60 s)"),
        (caused_by(GroupLost("reward raised", "x", "KeyError")), "task", "Correct the task at "),
        (caused_by(GroupLost("reward was invalid", "x")), "task", "rollout.max_lost (now 0.1)"),
        (AlarmRaised("entropy is low", "entropy"), "alarm", "set watchdog.entropy to 'warn'"),
        (NothingLearned("none of 2 steps"), "nothing learned", "python -m rl.view "),
        (UserCodeFailed("loss raised"), "your code", "Correct your code at "),
        (RunError("the ledger does not add up"), "unknown", "failure.json"),
    ],
)
def test_a_known_cause_names_what_to_change(run, monkeypatch, error, cause, said):
    monkeypatch.setattr(advice, "is_users", lambda error: False)  # the tests' own frames
    found, sentences = advice_after(error, run, FailedCall("step"))
    assert found == cause
    assert said in " ".join(sentences)
    assert sentences[-1] == f"Nothing is saved; start again with: {run.command}"
    for command in re.findall(r"python -m rl\..*", "\n".join(sentences[:-1])):
        words = shlex.split(command)
        check_command(["RUN" if word == str(run.folder) else word for word in words])


def test_the_generator_of_another_kind_of_run_is_named_with_its_section(run):
    task = run.config.task
    run.config = find_config("sft_jsonl")()
    run.config.evaluation = SampledEvaluationConfig(task=task)
    run.config.evaluation.generator.gpu_memory_utilization = 0.25
    failed = of_process(actor="generator-0", call="generate", cause=OutOfMemoryError("out"))
    _, sentences = advice_after(failed, run, FailedCall())
    assert "Lower evaluation.generator.gpu_memory_utilization (now 0.25)" in sentences[0]


@pytest.mark.parametrize("kept", [0, 2, 3])
def test_a_full_disk_never_advises_the_number_of_checkpoints_that_are_kept(run, kept):
    run.config.trainer.checkpoint.keep_latest_k = kept
    advised = advice_after(full_disk(), run, FailedCall())[1][0]
    assert (f"set trainer.checkpoint.keep_latest_k to 2 (now {kept})" in advised) == (kept != 2)


@pytest.mark.parametrize("saved", [0, 4])
def test_a_lost_episode_is_played_without_the_checkpoint_that_is_missing(run, saved):
    again = FailedCall.outside_steps(caused_by(GroupLost("reward raised", "x")), saved, saved=saved)
    said = advice_after(RunError("x"), run, again)[1][-3]
    command = re.search(r"python -m (rl\.play .* --prompt )N runs", said)[1] + "0"
    words = ["RUN" if word == str(run.folder) else word for word in shlex.split(command)]
    assert ("--run" in words) == (saved > 0)
    if not saved:
        check_command(["python", "-m", *words])


def test_a_process_that_the_kernel_ended_for_memory_says_so(run, monkeypatch):
    monkeypatch.setattr(run_folder, "oom_kills", lambda: 10**9)
    cause, sentences = advice_after(of_process("died"), run, FailedCall("step"))
    assert cause == "host memory"
    assert "The kernel ended processes of this host for it during the run: " in sentences[0]


@pytest.mark.parametrize(
    ("again", "said"),
    [(FailedCall("step"), "--failed"), (FailedCall(why_not="See RUN."), "See {folder}.")],
)
def test_advice_says_whether_the_call_can_be_made_again(run, again, said):
    _, sentences = advice_after(RunError("x"), run, again)
    assert said.format(folder=run.folder) in " ".join(sentences)
    assert ("--failed" in " ".join(sentences)) == bool(again.call)
