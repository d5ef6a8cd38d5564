"""First lines of a process in the sandbox: it locks itself in, then runs the program.

The interpreter runs this file without ``site`` and without Tiller. Standard input holds the
dict of :meth:`rl.sandbox.sandbox.Sandbox.start`, marshalled. If anything fails before the program
starts, the process ends without a byte in ``started``.
"""

import builtins
import ctypes
import marshal
import os
import resource
import struct
import sys
import types

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 8, 22, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # on every architecture
SIGKILL = 9

# linux/landlock.h
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
REMOVE, MAKE_DIR_REG, MAKE_SYM, REFER = 0b11 << 4, 0b11 << 7, 1 << 12, 1 << 13
READ = READ_FILE | READ_DIR
OWN = READ | WRITE_FILE | TRUNCATE | REMOVE | MAKE_DIR_REG | MAKE_SYM | REFER
OF_FILES = READ_FILE | WRITE_FILE | TRUNCATE
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of file rights by version of Landlock; 16 in later ones."""


def main() -> None:
    """Read the orders, give up all rights that the program must not have, and run it."""
    with open(0, "rb", closefd=False) as stdin:
        orders = marshal.load(stdin)
    for name, (soft, hard) in orders["limits"].items():  # the kernel enforces them
        resource.setrlimit(getattr(resource, name), (soft, hard))
    if orders["user"] is not None:
        become(orders["user"], orders["search"])
    if orders["dies_with_parent"]:
        _prctl(PR_SET_PDEATHSIG, SIGKILL)
        if os.getppid() != orders["parent"]:
            sys.exit("the process that started this program has ended")
    write_files(orders)
    if orders["filter"]:
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        restrict_files(orders["readable"], orders["devices"], orders["needs_landlock"])
        steps = ctypes.create_string_buffer(orders["filter"], len(orders["filter"]))
        header = struct.pack("HxxxxxxP", len(orders["filter"]) // 8, ctypes.addressof(steps))
        _prctl(PR_SET_SECCOMP, 2, header)
    os.write(orders["started"], b"+")
    run(orders)


def become(user: int, search: bool) -> None:
    """Change to another user, without privileges.

    With ``search``, one privilege is kept, which allows access to closed folders on the way to the
    interpreter's library. Landlock still decides which files can be read.
    """
    os.chown(".", user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    if search:
        _prctl(PR_SET_KEEPCAPS, 1)
    os.setresuid(user, user, user)
    if search:
        version, read_search = 0x20080522, 1 << 2  # linux/capability.h
        header = struct.pack("Ii", version, 0)
        _call("capset", header, struct.pack("6I", read_search, read_search, 0, 0, 0, 0))


def write_files(orders: dict) -> None:
    """Write the program's files into the current folder, and give it its standard input."""
    for name, text in orders["files"].items():
        _write(name, text)
    source = ".stdin" if orders["stdin"] else "/dev/null"
    if orders["stdin"]:
        _write(source, orders["stdin"])
    file = os.open(source, os.O_RDONLY)
    os.dup2(file, 0)
    os.close(file)
    if orders["stdin"]:
        os.unlink(source)


def restrict_files(readable: list[str], devices: list[str], needed: bool) -> None:
    """Restrict this process to these files and its current folder (Landlock).

    TCP, signals to and abstract sockets of other processes are refused if the kernel can.
    """
    version = _libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        if needed:
            sys.exit("this kernel has no Landlock (Linux 5.13 or later, in its list of LSMs)")
        return
    rights = (1 << FILE_RIGHTS.get(version, 16)) - 1
    network = 0b11 if version >= 4 else 0
    scopes = 0b11 if version >= 6 else 0
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    handled = struct.pack("QQQ", rights, network, scopes)[:size]
    rules = _call("syscall", CREATE_RULESET, handled, ctypes.c_size_t(size), 0)
    allowed = [(path, READ) for path in readable]
    allowed += [(path, OF_FILES) for path in devices]
    for path, wanted in [*allowed, (".", OWN)]:
        if not os.path.exists(path):
            continue
        file = os.open(path, os.O_PATH)
        fitting = wanted & rights & (-1 if os.path.isdir(path) else OF_FILES)
        _call("syscall", ADD_RULE, rules, 1, struct.pack("=Qi", fitting, file), 0)
        os.close(file)
    _call("syscall", RESTRICT_SELF, rules, 0)
    os.close(rules)


def run(orders: dict) -> None:
    """Run ``program.py`` of the current folder as ``__main__``."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    module.__file__ = "program.py"
    sys.modules["__main__"] = module
    sys.argv[:] = ["program.py"]
    sys.path.insert(0, "")
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as ``site`` does
    sys.excepthook = _show_error
    exec(compile(orders["files"]["program.py"], "program.py", "exec"), module.__dict__)


def _show_error(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _write(name: str, text: str) -> None:
    with open(name, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        file.write(text)


_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> int:
    answer = getattr(_libc, name)(*arguments)
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")
    return int(answer)


def _prctl(option: int, value: int, pointer: bytes = b"") -> None:
    zero = ctypes.c_ulong(0)
    _call("prctl", option, ctypes.c_ulong(value), pointer or zero, zero, zero)


if __name__ == "__main__":
    main()
