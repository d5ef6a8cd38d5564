"""Terminals, pipes and modules that fail do not fail a program."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rl.cli.program import begin
from rl.host.process import steady
from rl.observe.progress import Progress
from tests.kit.records import make_rows
from tests.kit.tables import long


def python(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run Python; ``options`` are those of subprocess.run."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def show(file, *, terminal: bool) -> None:
    """Everything that a run prints."""
    console = Console(file=file, force_terminal=terminal, width=100, highlight=False)
    with Progress(20, quiet=False, console=console) as progress:
        progress.stage("starting trainer on 4 ranks…")
        for row in make_rows(20):
            progress.update(row)
        progress.warn("step 2: drift")


@pytest.fixture
def plain(monkeypatch):
    """The error handler that ``begin`` registers, without the rest of it."""
    monkeypatch.setattr("rl.host.process.steady", lambda stream, number: stream)
    before = signal.getsignal(signal.SIGINT)
    begin()
    signal.signal(signal.SIGINT, before)


def closed_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def closed_terminal() -> int:
    other, own = os.openpty()
    os.close(other)
    return own


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    "open_it", [closed_pipe, closed_terminal, lambda: os.open("/dev/full", os.O_WRONLY)]
)
def test_output_that_cannot_be_written_does_not_end_a_program(open_it, terminal, plain):
    descriptor = open_it()
    with steady(None, descriptor) as file:
        show(file, terminal=terminal)
        print("x" * 100_000, file=file, flush=True)
    os.close(descriptor)


@pytest.mark.parametrize("terminal", [False, True])
def test_an_ascii_terminal_gets_replacement_characters(terminal, tmp_path, plain):
    out = (tmp_path / "out").open("w", encoding="ascii")
    with out, steady(out, out.fileno()) as file:
        show(file, terminal=terminal)
    shown = (tmp_path / "out").read_bytes().decode("ascii")
    assert "starting trainer on 4 ranks..." in shown
    assert " - correct 50% - 1,234 tok/s" in shown
    assert "?" not in shown.replace("\x1b[?", "")


def test_failing_output_does_not_change_the_exit_code():
    command = f"PYTHONIOENCODING=ascii {sys.executable} -m rl.launch > /dev/full"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


CATCHES_CTRL_C = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except BaseException:
    print("caught", flush=True)
print("went on", flush=True)
"""


@pytest.mark.parametrize(
    "program",
    [
        ["rl", "train"],
        long(["rl.train"]),
        long(["rl.plan"]),
        long(["rl.launch", "local"]),
    ],
    ids=" ".join,
)
def test_ctrl_c_ends_a_program_during_an_import_that_catches_it(program, tmp_path):
    (tmp_path / "torch.py").write_text(CATCHES_CTRL_C)
    command = ["-m", *program, "--config", "quickstart"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = python(*command, env=environment, preexec_fn=accept_interrupts)
    assert (done.returncode, done.stdout, "interrupted" in done.stderr) == (130, "", True)


HELP = (
    ("train", "--help"),
    ("train", "--config", "quickstart", "--help"),
    ("plan.__main__", "--help"),
    ("launch.__main__", "slurm", "--help"),
    ("doctor.__main__", "--help"),
    ("evaluate", "--help"),
    ("play", "--help"),
    ("serve", "--help"),
    ("export", "--help"),
    ("replay.__main__", "--help"),
    ("compare.__main__", "--help"),
    ("view.__main__", "--help"),
)


def test_help_is_printed_without_importing_torch():
    program = f"""
import contextlib, importlib, io, sys
for name, *arguments in {HELP}:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        importlib.import_module("rl." + name).main(arguments)
    if not out.getvalue().startswith("usage:"):
        print(name, arguments, "prints", out.getvalue()[:99])
    if imported := {{"torch", "tyro", "monarch"}} & {{*sys.modules}}:
        sys.exit(f"{{name}} {{arguments}} imports {{imported}}")
"""
    done = python("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def accept_interrupts() -> None:
    """Undo what a shell does to its jobs in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


WRONG = {
    ("train",): "--config NAME is missing",
    ("train", "--config", "quikstart"): "did you mean quickstart",
    ("launch", "slrum", "--config", "quickstart"): "did you mean slurm",
}


def test_a_wrong_name_is_refused_without_importing_torch():
    program = f"""
import os, runpy, sys
sys.modules["torch"] = None  # which fails any import of it
for name, *arguments in {[*WRONG]}:
    if not os.fork():
        sys.argv[1:] = arguments
        runpy.run_module("rl." + name, run_name="__main__", alter_sys=True)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = python("-c", program)
    assert (done.returncode, done.stdout) == (0, "2\n" * len(WRONG)), done.stderr
    messages = done.stderr.removeprefix("error: ").split("\nerror: ")
    for message, error in zip(messages, WRONG.values(), strict=True):
        assert error in message


def test_a_deleted_folder_is_named(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    program = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, sys.argv[1:])"
    rest = (program, sys.executable, "-m", "rl", "train")
    done = python("-c", *rest, cwd=folder, env=os.environ | {"PYTHONPATH": os.getcwd()})
    said = "error: the current folder was deleted; change to another\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_forked_process_leaves_the_files_of_its_parent():
    program = """
import os, sys
from rl.host.disk import TemporaryFolder
from rl.errors import end_program

name = TemporaryFolder("tiller-").name
for end in (end_program, os._exit, sys.exit):
    if os.fork() == 0:
        end(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7, end
    assert os.path.isdir(name), end
print(name)
"""
    done = python("-c", program)
    assert (done.returncode, done.stderr) == (0, "")  # a forked process does not try either
    assert not Path(done.stdout.strip()).exists()
