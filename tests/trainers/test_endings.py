"""Messages and exit codes of a run that ends early."""

import asyncio
import json
import os
import signal
import sys
import time
import traceback
from types import SimpleNamespace

import pytest

from rl import errors
from rl.algorithms.advantages import GAE
from rl.cli.arguments import find_config
from rl.config import users_code
from rl.errors import NodeLost, RunError
from rl.host.process import LEAVING
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.trainers.endings import Interrupts, fail
from rl.trainers.run_folder import RunFolder, claim_run
from tests.kit.processes import wait_until_delivered
from tests.trainers.loops import set_fields

COMMAND = "python -m rl.train --config quickstart"


@pytest.fixture
def record(tmp_path):
    return RunRecord(tmp_path / "run")


@pytest.fixture
def folder(record):
    """Folder of a run of 100 steps."""
    progress = Progress(100, quiet=True, log=record.run_log)
    return RunFolder(find_config("quickstart")(), record, progress, command=COMMAND)


@pytest.fixture
def ended(folder, capsys):
    """Function that fails a run with an exception and returns the exit code and the output."""
    return lambda error: (fail(error, folder), capsys.readouterr().err)


def save(record, *steps, complete=True):
    """Write checkpoints."""
    for step in steps:
        (record.checkpoints / f"step-{step}").mkdir()
        if complete:
            (record.checkpoints / f"step-{step}" / ".metadata").touch()


def raised_by(code, name, **names):
    """Return the exception that ``code`` raises, as of a file ``name``."""
    try:
        exec(compile(code, name, "exec"), names)
    except BaseException as error:
        return error
    raise AssertionError


def boom():
    raise ZeroDivisionError("no prompts today")


def test_a_failure_prints_type_place_details_and_the_resume_command(record, ended):
    code = "def prompt(): raise ValueError('out of prompts')\nprompt()"
    code, said = ended(raised_by(code, "/home/me/my_task.py"))
    assert (code, said.splitlines()) == (
        1,
        [
            "failed outside the steps: ValueError: out of prompts",
            "at /home/me/my_task.py, line 1, in prompt",
            f"details: {record.folder / 'failure.json'}",
            "- Correct your code at /home/me/my_task.py, line 1, in prompt.",
            "- The failing call is not one of a step, so it cannot be made again alone; a resumed "
            "run makes it again.",
            f"- See what is wrong with the host and the run folder: python -m rl.doctor "
            f"{record.folder}",
            f"nothing is saved; start again with: {COMMAND} --output-dir {record.folder} --resume",
        ],
    )
    assert said.splitlines()[0] in record.run_log.read_text()
    failure = json.loads((record.folder / "failure.json").read_text())
    assert (failure["cause"], failure["type"]) == ("your code", "ValueError")
    assert all(f"\n- {sentence}\n" in said for sentence in failure["advice"][:-1])


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ((4, 12), "go on from step 12 with: "),  # step 16 is incomplete
        ((100,), "all 100 steps are done; evaluate again with: "),
    ],
)
def test_a_failure_says_from_which_step_to_go_on(record, ended, saved, said):
    save(record, *saved)
    save(record, 16, complete=False)
    assert f"\n{said}python -m rl.train " in ended(RunError("x"))[1]


def test_a_resume_changes_the_folder_once_its_checkpoint_has_loaded(tmp_path, capsys):
    def claimed(**fields):
        config = find_config("quickstart")()
        set_fields(config, {"output_dir": str(tmp_path / "run"), **fields})
        return claim_run(config, 100, name="quickstart", command=" ".join([COMMAND, *fields]))

    claimed().release()
    path = tmp_path / "run" / "config.json"
    first = path.read_bytes()
    save(RunRecord(tmp_path / "run"), 8)
    failure = tmp_path / "run" / "failure.json"
    failure.write_text("{}")
    events = failure.with_name("events.jsonl")
    before = events.read_bytes() if events.exists() else b""
    folder = claimed(resume=True, **{"model.dim": 128})
    assert path.read_bytes() == first
    fail(RunError("the shapes differ"), folder)
    assert (events.read_bytes() if events.exists() else b"") == before
    assert failure.read_text() == "{}"
    cause = json.loads((failure.parent / "logs" / "resume-failure.json").read_text())
    assert cause["error"] == "the shapes differ"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("the run did not resume with another model.dim, and its folder is as")
    assert last.endswith(f"go on without the changes: {COMMAND} --resume")
    assert path.read_bytes() == first
    folder.begin()
    assert json.loads(path.read_text())["config"]["model"]["dim"] == 128
    fail(RunError("another failure"), folder)
    assert json.loads(failure.read_text())["error"] == "another failure"
    assert "resuming with another model.dim" in events.read_text()
    assert "go on from step 8 with: " in capsys.readouterr().err.splitlines()[-1]
    folder.release()


@pytest.mark.parametrize(("steps", "critic"), [(4, False), (4, True), (11, False)])
def test_a_warmup_that_is_longer_than_the_run_is_a_warning(steps, critic, tmp_path, capsys):
    config = find_config("quickstart")()
    config.output_dir = str(tmp_path / "run")
    config.trainer.lr_scheduler.warmup_steps = 10
    if critic:
        config.algorithm.advantage = GAE.Config()
        config.critic.lr_scheduler.warmup_steps = 5
    claim_run(config, steps, name="quickstart", command="train").release()
    said = capsys.readouterr().out
    warning = "trainer.lr_scheduler.warmup_steps is 10, and the run takes 4 optimizer steps"
    assert (warning in said) == (steps == 4)
    assert ("critic.lr_scheduler.warmup_steps is 5, and the run takes" in said) == critic


@pytest.mark.parametrize(
    ("error", "code"), [(RunError("a"), 1), (NodeLost("a"), 75), (SystemExit(0), 1), (OSError(), 1)]
)
def test_a_failure_has_the_exit_code_of_its_kind(error, code, ended):
    assert ended(error)[0] == code


def test_the_first_cause_is_printed_if_failure_json_cannot_be_written(record, ended):
    (record.folder / "failure.json.partial").symlink_to("/dev/full")
    _, said = ended(RunError("trainer rank 0 died"))
    assert "failed outside the steps: trainer rank 0 died\n" in said
    assert "no details: " in said
    assert "failure.json: cannot be written: No space left on device; make room" in said
    assert "\ndetails: " not in said
    assert "start again with: " in said


def test_an_exception_without_text_is_printed_by_type(ended):
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError

    assert ended(Broken())[1].startswith("failed outside the steps: ")


def test_the_place_is_the_innermost_frame_of_the_users_own_code(monkeypatch):
    """The place is the exception's if no frame is the user's; it may be in another process."""
    # json is a library: the frame that called it is the user's.
    error = raised_by("import json\ndef read(): json.loads('{')\nread()", "/home/me/my_task.py")
    assert users_code.place_of(error) == "/home/me/my_task.py, line 2, in read"
    try:
        boom()
    except ZeroDivisionError:
        text = traceback.format_exc()
    error = raised_by("raise Error(text)", errors.__file__, Error=RunError, text=text)
    assert (
        users_code.place_of(error)
        == f"{__file__}, line {boom.__code__.co_firstlineno + 1}, in boom"
    )
    monkeypatch.setattr(users_code, "_FOREIGN", (*users_code._FOREIGN, __file__))
    error = raised_by("import json; json.loads('{')", "<string>")
    assert "json/decoder.py, line" in users_code.place_of(error)
    assert users_code.place_of(RunError("never raised")) == "an unknown place"


def interrupted(
    record, steps, *, training=True, in_step=False, blocked=False, numbers=(), ignored=()
):
    """Return exit code and output of a process whose run gets signals after ``steps`` steps.

    The process leaves as the loop does. If ``blocked``, it computes without an await.
    """

    async def main():
        left = asyncio.Event()
        config = find_config("quickstart")()
        trainer = SimpleNamespace(total_steps=config.steps, step=steps)
        folder = RunFolder(config, record, Progress(9, quiet=False), command="train")
        run = SimpleNamespace(
            trainer=trainer,
            is_training=training,
            is_in_step=in_step,
            leave=left.set,
            claim=lambda: folder,
        )
        with Interrupts(run) as interrupts:
            print("ready", flush=True)
            ends = time.monotonic() + 60
            while blocked and time.monotonic() < ends:
                time.sleep(0.01)
            try:
                await asyncio.wait_for(left.wait(), 60)
            except asyncio.CancelledError:
                print("cancelled", flush=True)
            os._exit(interrupts.interrupted().exit_code)

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        try:
            sys.stdout = os.fdopen(1, "w")
            sys.stderr = os.fdopen(2, "w")
            for number in LEAVING:  # the tests may run under nohup(1) or in the background
                signal.signal(number, signal.SIG_DFL)
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)
            asyncio.run(main())
        finally:
            os._exit(99)
    os.close(write)
    with os.fdopen(read) as said:
        assert said.readline() == "ready\n"
        for number in numbers:
            wait_until_delivered(child)
            os.kill(child, number)
        words = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), words


@pytest.mark.parametrize(
    ("number", "state", "code", "said"),
    [
        ("SIGINT", {"in_step": True}, 130, "finishing step 12, then saving; Ctrl-C again quits "),
        ("SIGINT", {}, 130, "saving step 11; Ctrl-C again quits "),
        ("SIGHUP", {"in_step": True}, 75, "finishing step 12, then saving; Ctrl-C quits "),
        ("SIGTERM", {}, 75, "saving step 11; Ctrl-C quits "),
        ("SIGUSR1", {"training": False}, 75, "leaving; Ctrl-C quits "),
    ],
)
def test_the_first_signal_prints_how_the_run_will_end(number, state, code, said, record):
    found = interrupted(record, 11, **state, numbers=[signal.Signals[number]])
    cancelled = "" if state.get("training", True) else "cancelled\n"
    assert found == (code, f"{number}: {said}immediately\n{cancelled}")


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_leaves_at_once_though_the_loop_is_blocked(first, record):
    save(record, 8)
    code, said = interrupted(record, 11, blocked=True, numbers=[first, signal.SIGINT])
    how = f"go on from step 8 with: train --output-dir {record.folder} --resume"
    assert code == 130
    assert said == f"\nquit immediately: the work after step 8 is lost; {how}\n"


def test_a_resumed_run_that_has_not_loaded_yet_is_interrupted_after_its_checkpoint(record, folder):
    save(record, 8)
    run = SimpleNamespace(trainer=SimpleNamespace(step=0), claim=lambda: folder)
    error = Interrupts(run).interrupted()
    assert str(error).startswith("interrupted by leave() after step 8; go on from step 8 with: ")


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(ignored, record):
    code, said = interrupted(record, 11, numbers=[ignored, signal.SIGTERM], ignored=[ignored])
    assert (code, said.partition(":")[0]) == (75, "SIGTERM")
