"""Sandboxes: bubblewrap's namespaces, or Landlock without namespaces, or none."""

import asyncio
import os
import platform
import secrets
import shutil
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent import futures
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from rl.errors import ConfigError
from rl.host.threads import in_thread
from rl.sandbox.sandboxed_program import Limits, Program, Result, SandboxError
from rl.sandbox.seccomp import ARCHITECTURES, seccomp_filter

LAUNCHER = Path(__file__).with_name("launcher.py")
PYTHON = os.path.realpath(sys.executable)
PREFIX = os.path.realpath(sys.base_prefix)
NOBODY = 65534
FIRST_USER, USERS = 2_000_000_000, 100_000_000  # of no system and no container manager
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ["/dev/null", "/dev/zero", "/dev/urandom"]
ENVIRONMENT = {
    "HOME": ".",
    "TMPDIR": ".",
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the same program prints the same
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # a thread's own arena takes 64 MiB of address space
}
PROBE = """
import threading
thread = threading.Thread(target=print, args=["ok"])
thread.start()
thread.join()
"""
HELP = (
    "Install bubblewrap 0.8 or later (apt-get install bubblewrap) on a host that allows user "
    "namespaces, or use a kernel with Landlock (Linux 5.13 or later); or accept that programs "
    "run without a sandbox (unsafe)"
)


class Sandbox(ABC):
    """Runs untrusted Python programs. ::

        sandbox = open_sandbox()
        result = sandbox.run("print(6 * 7)", limits=Limits(wall_s=1))
        assert result.stdout == "42\\n"

    A program is one process with the standard library. It has an empty folder of its own, and
    neither network, nor other files or processes, nor the environment of the caller. It cannot
    start processes or send signals. When a method returns, the process has ended and its files
    are deleted; if the caller dies, the process is killed.
    """

    name: ClassVar[str]
    scratch: ClassVar[bool] = True
    """Whether the program's folder is one of this host, instead of one of its namespace."""

    def run(self, code: str, **options: Any) -> Result:
        """Run ``code`` and return its result; ``options`` are those of :meth:`start`. May be called
        in any thread.

        Raises SandboxError if the program could not be started.
        """
        with self.start(code, **options) as program:
            return program.wait()

    async def run_async(self, code: str, **options: Any) -> Result:
        """Run ``code`` like :meth:`run`, without blocking the event loop. Cancelling the call ends
        the program.
        """
        with self.start(code, **options) as program:
            result = in_thread(program.wait)
            try:
                return await asyncio.wrap_future(result)
            finally:
                program.end()
                futures.wait([result])

    def start(
        self,
        code: str,
        *,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        fds: Sequence[int] = (),
    ) -> Program:
        """Start a program. Leaving its ``with`` block ends it.

        Args:
            code: Program, run as ``__main__``.
            limits: Limits of the program.
            files: Text by file name, written into the program's folder.
            stdin: Text of standard input.
            fds: File descriptors that the program inherits.
        """
        mib = 1 << 20
        most = {
            "RLIMIT_AS": (limits.memory_mib * mib,) * 2,
            "RLIMIT_CPU": (limits.cpu_s, limits.cpu_s + 1),
            "RLIMIT_FSIZE": (limits.disk_mib * mib,) * 2,
            "RLIMIT_NOFILE": (64 + len(fds),) * 2,
            "RLIMIT_CORE": (0, 0),
        }
        orders = {
            "files": {**(files or {}), "program.py": code},
            "stdin": stdin,
            "limits": most,
            "user": None,
            "search": False,
            "parent": os.getpid(),
            "dies_with_parent": False,
            "readable": _readable(),
            "devices": DEVICES,
            "needs_landlock": False,
            "filter": seccomp_filter(),
        }
        command = self._command(orders, limits)
        # a shared libpython that is not at its place: of a module system, say
        search = os.environ.get("LD_LIBRARY_PATH", "").split(":")
        libraries = [folder for folder in search if Path(folder).is_relative_to(sys.base_prefix)]
        needed = ENVIRONMENT | ({"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {})
        return Program(
            self.name,
            command,
            orders,
            limits,
            fds=fds,
            environment=needed if orders["filter"] else {**os.environ, **ENVIRONMENT},
            scratch=self.scratch,
        )

    @abstractmethod
    def _command(self, orders: dict[str, Any], limits: Limits) -> list[str]:
        """Complete the orders; return the command of the launcher."""

    def complaint(self) -> str:
        """Return why this sandbox does not work on this host; empty if it works."""
        if platform.machine() not in ARCHITECTURES:
            return f"no list of system calls for {platform.machine()}"
        try:
            result = self.run(PROBE, limits=Limits(wall_s=10))
        except (SandboxError, OSError) as error:
            return str(error)
        return "" if result.stdout == "ok\n" else (result.stderr or f"a probe ended as {result}")


class Bubblewrap(Sandbox):
    """Program in namespaces of its own: it sees no process, no network, and of the files only the
    interpreter's. Landlock applies too, if the kernel has it.
    """

    name = "bubblewrap"
    scratch = False

    def _command(self, orders: dict[str, Any], limits: Limits) -> list[str]:
        rights = ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"]
        if os.getuid() == 0:
            orders["user"] = _other_user()
            keep = ("CAP_SETUID", "CAP_SETGID", "CAP_CHOWN")  # until it is that user
            rights = ["--cap-drop", "ALL", *(word for cap in keep for word in ("--cap-add", cap))]
        orders["limits"]["RLIMIT_NPROC"] = (limits.threads,) * 2
        return [
            *(_bwrap(), "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-net"),
            *("--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", *rights, *_binds()),
            *("--ro-bind", str(LAUNCHER), "/launcher.py", "--dev", "/dev"),
            *("--size", str(limits.disk_mib << 20), "--tmpfs", "/scratch", "--chdir", "/scratch"),
            *("--", *_python("/launcher.py")),
        ]

    def complaint(self) -> str:
        return super().complaint() if _bwrap() else "bwrap is not installed"


class Landlock(Sandbox):
    """Program that may read the interpreter, write its folder, and make harmless system calls.

    Weaker than namespaces: names, sizes and times of files outside are visible (``os.stat``).
    """

    name = "Landlock"

    def _command(self, orders: dict[str, Any], limits: Limits) -> list[str]:
        orders |= {"needs_landlock": True, "dies_with_parent": True}
        if os.getuid() == 0:
            orders["user"] = _other_user()
            folders = [PREFIX, *map(str, Path(PREFIX).parents)]
            modes = [os.stat(folder).st_mode & 0o005 for folder in folders]
            orders["search"] = modes != [0o005] * len(folders)  # closed to other users
            orders["limits"]["RLIMIT_NPROC"] = (limits.threads,) * 2
        return _python(str(LAUNCHER))


class Unsafe(Sandbox):
    """No sandbox: a program with limits that can read, write and reach whatever the caller can."""

    name = "unsafe"

    def _command(self, orders: dict[str, Any], limits: Limits) -> list[str]:
        orders |= {"filter": None, "dies_with_parent": True}
        return _python(str(LAUNCHER))

    def complaint(self) -> str:
        return ""


@cache
def open_sandbox(*, unsafe: bool = False) -> Sandbox:
    """Return the strongest sandbox that works on this host.

    Raises ConfigError if none works, unless ``unsafe`` is True: programs then run without one.
    """
    reasons = []
    for sandbox in (Bubblewrap(), Landlock()):
        reason = sandbox.complaint()
        if not reason:
            return sandbox
        reasons.append(f"{sandbox.name}: {reason.strip()}")
    if unsafe:
        return Unsafe()
    raise ConfigError(f"no sandbox works on this host ({'; '.join(reasons)}). {HELP}")


def _bwrap() -> str:
    return shutil.which("bwrap") or ""


def _python(launcher: str) -> list[str]:
    return [PYTHON, "-s", "-S", "-P", "-B", launcher]


@cache
def _readable() -> list[str]:
    """Return what an interpreter reads: its library and shared libraries."""
    folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), f"{PREFIX}/lib"]
    return sorted({*folders, *LIBRARIES})


@cache
def _binds() -> list[str]:
    wanted = {"/usr", "/bin", PREFIX, *_readable()}
    binds = list[str]()
    bound = list[str]()
    for path in sorted(filter(os.path.exists, wanted)):
        if os.path.islink(path):
            binds += ["--symlink", os.readlink(path), path]
        elif not any(path.startswith(f"{folder}/") for folder in bound):
            bound.append(path)
            for parent in [*Path(path).parents][-2::-1]:  # bubblewrap would close these to others
                binds += ["--perms", "0755", "--dir", str(parent)]
            binds += ["--ro-bind", path, path]
    return binds


def _other_user() -> int:
    """Return a user that runs nothing else, so that its limit of threads is the program's."""
    user = FIRST_USER + secrets.randbelow(USERS)
    rows = [map(int, row.split()) for row in Path("/proc/self/uid_map").read_text().splitlines()]
    lasts = [first + count - 1 for first, _, count in rows]
    return user if max(lasts) >= FIRST_USER + USERS else max(lasts)
