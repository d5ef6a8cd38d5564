"""Results of programs, and the end of a program together with its caller."""

import asyncio
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rl.errors import ConfigError
from rl.sandbox import sandbox as module
from rl.sandbox.sandbox import Bubblewrap, Landlock, Unsafe, open_sandbox
from rl.sandbox.sandboxed_program import Limits, SandboxError
from rl.sandbox.seccomp import CONDITIONAL, allowed_calls, seccomp_filter
from tests.sandbox.conftest import ROOT
from tests.sandbox.worker import own_launcher, programs

LONG = Limits(wall_s=60, cpu_s=20)
KERNEL = Path("/usr/include")


@pytest.fixture(params=["bubblewrap", "Landlock"])
def sandbox(request, monkeypatch):
    if request.param == "Landlock":
        return Landlock()
    monkeypatch.setenv("PATH", f"{request.getfixturevalue('bwrap')}:{os.environ['PATH']}")
    return Bubblewrap()


def test_a_program_has_files_input_outputs_and_an_exit_code(sandbox):
    code = """
import other, sys
print("ü", other.x, sys.stdin.read(), open("other.py").read())
print("e", file=sys.stderr)
sys.exit(7)
"""
    result = sandbox.run(code, limits=LONG, files={"other.py": "x = 5"}, stdin="in\r\n")
    assert (result.exit_code, result.limit) == (7, None)
    assert (result.stdout, result.stderr) == ("ü 5 in\r\n x = 5\n", "e\n")
    assert 0 < result.seconds < 60
    assert "EOFError" in sandbox.run("print(input())", limits=LONG).stderr
    crash = "import ctypes; ctypes.string_at(0)"
    assert sandbox.run(crash, limits=LONG).exit_code == -signal.SIGSEGV


def test_libraries_are_looked_for_in_folders_of_python_alone(sandbox, monkeypatch):
    own = f"{sys.base_prefix}/lib"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/home:{own}:")
    result = sandbox.run("import os; print(os.environ['LD_LIBRARY_PATH'])", limits=LONG)
    assert (result.stdout, result.stderr) == (f"{own}\n", "")


def test_traceback_shows_the_program_only(sandbox):
    result = sandbox.run("def f():\n    return 1 / 0\nf()", limits=LONG)
    lines = re.findall(r'File "(.*)", line (\d+)', result.stderr)
    assert lines == [("program.py", "3"), ("program.py", "2")]
    assert "return 1 / 0" in result.stderr


def test_text_that_is_no_program_is_an_error_of_the_program():
    for code in ("1 +", "\ud800", "x = '\0'"):
        result = Landlock().run(code, limits=LONG)
        assert result.exit_code == 1, code
        assert "Error" in result.stderr, code


def test_ordinary_programs_run(sandbox):
    code = """
import asyncio, concurrent.futures, dataclasses, decimal, json, math, pathlib, random, re, sqlite3
import tempfile, unittest, zoneinfo
async def main():
    return await asyncio.gather(*(asyncio.to_thread(abs, -n) for n in range(4)))
print(asyncio.run(main()), zoneinfo.ZoneInfo("Europe/Berlin"))
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(math.factorial, range(5))))
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "a.db")
    base = sqlite3.connect(path)
    base.execute("create table t (n)").execute("insert into t values (3)")
    base.commit()
    print(base.execute("select n from t").fetchall(), path.exists())
import os, sys
open(os.devnull, "w").write("x")
print(sys.argv, __name__, hash("x"))
exit(3)
"""
    results = [sandbox.run(code, limits=LONG) for _ in range(2)]
    assert results[0].exit_code == 3, results[0]
    wanted = "[0, 1, 2, 3] Europe/Berlin\n34\n[(3,)] True\n['program.py'] __main__ "
    assert results[0].stdout.startswith(wanted)
    assert results[0].stdout == results[1].stdout, "hashes are the same in each run"


def test_descriptors_that_are_given_arrive(sandbox):
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w"):
        code = f"import os; os.write({writer}, b'hello')"
        with sandbox.start(code, limits=LONG, fds=[writer]) as program:
            assert program.wait().exit_code == 0
        assert os.read(reader, 99) == b"hello"


async def test_many_programs_at_once_and_in_threads(sandbox):
    results = await asyncio.gather(
        *(sandbox.run_async(f"print({number})", limits=LONG) for number in range(6)),
        *(asyncio.to_thread(sandbox.run, f"print({number})", limits=LONG) for number in (6, 7)),
    )
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(8)]


def test_cancelled_call_leaves_nothing(sandbox, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LAUNCHER", module.LAUNCHER)  # set back at the end
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    launcher = own_launcher(tmp_path)
    descriptors = len(os.listdir("/proc/self/fd"))

    async def run():
        task = asyncio.create_task(sandbox.run_async("import time; time.sleep(60)", limits=LONG))
        while not programs(launcher):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        while programs(launcher):  # the kernel may still be ending them
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 120))
    assert os.listdir(tmp_path / "scratch") == []
    # what earlier tests left may be collected meanwhile
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_program_ends_with_its_caller(sandbox, tmp_path):
    def wait_until(holds, seconds=120):
        ends = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < ends
            time.sleep(0.02)

    name = type(sandbox).__name__
    code = f"""
from rl.sandbox.sandboxed_program import Limits
from rl.sandbox.sandbox import {name}
from tests.sandbox.worker import own_launcher
from pathlib import Path
own_launcher(Path({str(tmp_path)!r}))
{name}().run("import time; print(flush=True); time.sleep(99)", limits=Limits(wall_s=99))
"""
    launcher = tmp_path / "launcher.py"
    caller = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    try:
        wait_until(lambda: programs(launcher))
        time.sleep(0.5)  # for the launcher to ask for the parent's death
    finally:
        caller.kill()
        caller.wait()
    wait_until(lambda: not programs(launcher))


def test_program_that_cannot_start_is_an_error_of_the_sandbox(sandbox):
    with pytest.raises(SandboxError, match=f"{sandbox.name} could not start a program"):
        sandbox.run("print(1)", limits=Limits(disk_mib=0))


def test_a_clock_of_a_program_begins_when_it_starts(sandbox, monkeypatch):
    python = module._python
    wait = "sleep 2.5; exec "
    slow = lambda file: ["/bin/sh", "-c", wait + " ".join(python(file))]  # noqa: E731
    monkeypatch.setattr(module, "_python", slow)
    assert sandbox.run("pass", limits=Limits(wall_s=2, cpu_s=20)).limit is None


def test_best_sandbox_is_chosen(bwrap, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert open_sandbox.__wrapped__().name == "Landlock"
    monkeypatch.setenv("PATH", str(bwrap))
    assert open_sandbox.__wrapped__().name == "bubblewrap"


def test_host_without_a_sandbox_is_refused_unless_unsafe(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(Landlock, "complaint", lambda self: "this kernel has no Landlock")
    message = "bwrap is not installed; Landlock: this kernel has no Landlock.*Install bubblewrap"
    with pytest.raises(ConfigError, match=message):
        open_sandbox.__wrapped__()
    sandbox = open_sandbox.__wrapped__(unsafe=True)
    assert isinstance(sandbox, Unsafe)
    assert sandbox.run("import os; print(os.fork() >= 0)", limits=LONG).stdout


def test_architecture_without_a_list_of_calls_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert Landlock().complaint() == "no list of system calls for riscv64"
    assert seccomp_filter("riscv64") is None


@pytest.mark.parametrize("column", [0, 1])
def test_numbers_of_calls_are_the_kernels(column):
    header = ("x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h")[column]
    if not (KERNEL / header).exists():
        pytest.skip(f"the kernel's header {header} is missing (linux-libc-dev)")
    text = (KERNEL / header).read_text()
    found = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", text)
    numbers = {name: int(number) for name, number in found}
    numbers["newfstatat"] = numbers.get("newfstatat", numbers.get("fstatat"))
    wanted = allowed_calls(column)
    wanted |= {name: both[column] for name, (both, _) in CONDITIONAL.items() if both[column]}
    assert {name: numbers[name] for name in wanted} == wanted
    assert len(wanted) > 100
