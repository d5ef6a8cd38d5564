"""Terminals, pipes and modules that fail do not fail a program."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from rl.observe.progress import Progress
from rl.program import begin, steady
from tests.observe.rows import make_rows


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
    monkeypatch.setattr("rl.program.steady", lambda stream, number: stream)
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


@pytest.mark.parametrize(
    "program", [["rl.train"], ["rl.plan"], ["rl.launch", "local"], ["rl", "train"]], ids=" ".join
)
def test_ctrl_c_ends_a_program_during_an_import_that_catches_it(program, tmp_path):
    (tmp_path / "torch.py").write_text(
        textwrap.dedent(
            """
            import os, signal, time
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            except BaseException:
                print("caught", flush=True)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", *program, "--config", "quickstart"]
    started = time.monotonic()
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        preexec_fn=accept_interrupts,
    )
    assert (done.returncode, done.stdout, "interrupted" in done.stderr) == (130, "", True)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("rl.train", ["--help"]),
        ("rl.train", ["--config", "quickstart", "--help"]),
        ("rl.plan.__main__", ["--help"]),
        ("rl.launch.__main__", ["slurm", "--help"]),
        ("rl.evaluate", ["--help"]),
        ("rl.play", ["--help"]),
        ("rl.serve", ["--help"]),
        ("rl.export", ["--help"]),
        ("rl.replay", ["--help"]),
        ("rl.compare", ["--help"]),
        ("rl.view.__main__", ["--help"]),
    ],
)
def test_help_is_printed_without_importing_torch(program, arguments):
    code = (
        f"import sys, contextlib; from {program} import main\n"
        f"with contextlib.suppress(SystemExit): main({arguments})\n"
        "print(*{'torch', 'tyro', 'monarch'} & {*sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout[:6], done.stderr) == ("usage:", "\n")


def accept_interrupts() -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell in the background ignores them


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("train",), "--config NAME is missing"),
        (("train", "--config", "quikstart"), "did you mean quickstart"),
        (("launch", "slrum", "--config", "quickstart"), "did you mean slurm"),
    ],
)
def test_a_wrong_name_is_refused_without_importing_torch(arguments, error):
    program = textwrap.dedent("""
        import runpy, sys
        sys.modules["torch"] = None  # which fails any import of it
        name, *sys.argv[1:] = sys.argv[1:]
        runpy.run_module(f"rl.{name}", run_name="__main__", alter_sys=True)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and error in done.stderr


def test_a_deleted_folder_is_named(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    program = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", program, sys.executable, "-m", "rl", "train"],
        cwd=folder, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        2,
        "error: the current folder was deleted; change to another\n",
    )


@pytest.mark.parametrize("ends", ["end_program(7)", "os._exit(7)", "sys.exit(7)"])
def test_a_forked_process_leaves_the_files_of_its_parent(ends):
    program = f"""
import os, sys
from rl.disk import TemporaryFolder
from rl.errors import end_program

name = TemporaryFolder("tiller-").name
if os.fork() == 0:
    {ends}
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
assert os.path.isdir(name)
print(name)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()
