"""Fork server: a process that has imported what ranks import, and forks the ranks of this host.

Imports of torch and torchtitan are most of the CPU time of a start. The server is forked from a
program before the program reads its config, so that no module of the user is imported, and before
Monarch starts its threads. Ranks of other hosts, ranks with several threads, and ranks on CUDA,
whose driver cannot be used after a fork, are executed instead.
"""

import contextlib
import ctypes
import gc
import json
import os
import random
import runpy
import secrets
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from rl.actors.guard import PR_SET_PDEATHSIG, guard
from rl.errors import EXIT_FAILED, at_end, end_program
from rl.host.process import COLLECT_AT, LEAVING, allow_open_files, steady

SERVER = "TILLER_FORK_SERVER"
"""Variable with the name of the server's socket."""
LOG = "TILLER_LOG"
"""Variable with the path of a rank's log."""
GUARDED = "TILLER_GUARDED"
"""Variable of a rank that ends with all processes that it started."""
ENDURE = "import signal; signal.signal(signal.SIGTERM, lambda number, frame: None)"
"""Program of a guarded rank. SIGTERM does not end the rank. It ends processes that the rank starts:
unlike SIG_IGN, a handler is not inherited."""
LEAVE_TERMINAL = """
import contextlib, fcntl, os, termios
with open(os.devnull) as nothing:
    os.dup2(nothing.fileno(), 0)
with contextlib.suppress(OSError), open("/dev/tty", "rb", 0) as terminal:
    fcntl.ioctl(terminal, termios.TIOCNOTTY)
"""
"""Program of a process that leaves its terminal, if any. The kernel stops a process of the
background that sets or reads the terminal, as vLLM's compilers do when they are imported."""
PR_SET_NAME = 15
CREDENTIALS = "iII"  # pid, user and group, as the kernel packs them
LONGEST_READ = 1 << 16
ACCEPT_AGAIN_S = 0.1
EXECUTE = b"execute"
"""Answer of a server that cannot fork the rank."""
PRELOADED = (
    "rl.generation.engine",
    "rl.rollout.scoring",
    "rl.training.checkpoint",
    "rl.training.engine",
    "rl.weights.shared_memory",
)
"""Modules that ranks import. They start no thread, and do not import Monarch."""

ASK = f"""
import json, signal, socket
server = socket.socket(socket.AF_UNIX)
try:
    server.connect("\\0" + os.environ["{SERVER}"])
except OSError:
    server.close()
else:
    request = json.dumps([sys.argv[-1], os.getcwd(), dict(os.environ)])
    socket.send_fds(server, [request.encode() + b"\\n"], [1, 2])
    answer = server.recv(16)
    server.close()
    if answer != {EXECUTE!r}:
        code = int(answer or -signal.SIGKILL)
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
"""
"""Program of the process that Monarch starts. The server forks the rank, and the process ends as
the rank does. The program goes on if the server does not listen or cannot fork."""

_name = ""


def start(*, preload: bool = True) -> None:
    """Fork the server from this process. The server ends with the calling thread.

    Imports PRELOADED before, which takes seconds. Without ``preload`` the server imports them when
    it forks its first rank. Does nothing on CUDA, if a server runs, and if this process has other
    threads, whose locks a fork would leave locked.
    """
    global _name
    if _name:
        return
    if preload:
        _preload()
        from rl.host.platform import device_type

        if device_type() != "cpu":
            return
    if len(os.listdir("/proc/self/task")) > 1:
        return
    name = f"tiller-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(1024)
    owner = os.getpid()
    allow_open_files()  # ranks inherit the limit
    server = os.fork()
    if server == 0:
        end_with(owner)
        _rename("fork-server")
        exec(LEAVE_TERMINAL)
        for number in LEAVING:
            signal.signal(number, signal.SIG_IGN)
        gc.freeze()  # a collection would write to the pages that ranks share
        try:
            _serve(listener)
        finally:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(EXIT_FAILED)  # this process must not go on as the program
    listener.close()
    at_end.append(partial(_stop, server))
    _name = name


def _stop(server: int) -> None:
    """End the server and take it from the process table."""
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


def variables() -> dict[str, str]:
    """Return the variables of a rank that the server may fork; empty without a server."""
    return {SERVER: _name} if _name else {}


def _serve(listener: socket.socket) -> NoReturn:
    """Fork a rank for each connection."""
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ, partial(_accept, events, listener))
    while True:
        for key, _ in events.select()[:1]:  # one event may take back another
            key.data()


def _accept(events: selectors.BaseSelector, listener: socket.socket) -> None:
    try:
        client, _ = listener.accept()
    except OSError:  # too many open files: the connection waits
        time.sleep(ACCEPT_AGAIN_S)
        return
    packed = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(CREDENTIALS))
    if struct.unpack(CREDENTIALS, packed)[1] != os.getuid():  # all users can see the name
        client.close()
        return
    outputs = list[int]()
    try:
        request, outputs, _, _ = socket.recv_fds(client, LONGEST_READ, 2)
        while request and request[-1:] != b"\n":
            more = client.recv(LONGEST_READ)
            request = request + more if more else b""
        rank = _fork() if request and len(outputs) == 2 else None
    except OSError:  # too many open files or processes, no memory, or the other end has gone
        rank = None
    if rank is None:
        with contextlib.suppress(OSError):
            client.send(EXECUTE)
        client.close()
    else:
        _follow(events, client, request, outputs, *rank)
    for output in outputs:
        os.close(output)


def _fork() -> tuple[int, int]:
    """Fork this process; return the child's pid and descriptor, 0 and -1 in the child."""
    _preload()
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        end_with(server)
        return 0, -1
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _follow(
    events: selectors.BaseSelector,
    client: socket.socket,
    request: bytes,
    outputs: list[int],
    pid: int,
    descriptor: int,
) -> None:
    """Become the rank in the child. In the server, kill the rank if the connection ``client``
    closes, and tell the connection how the rank has ended.
    """
    if pid == 0:
        for key in [*events.get_map().values()]:
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        events.close()
        client.close()
        _become(outputs, *json.loads(request))

    def kill() -> None:
        events.unregister(client)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def tell() -> None:
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # the other process has ended
            client.send(str(os.waitstatus_to_exitcode(status)).encode())
        with contextlib.suppress(KeyError):
            events.unregister(client)
        events.unregister(descriptor)
        client.close()
        os.close(descriptor)

    events.register(client, selectors.EVENT_READ, kill)
    events.register(descriptor, selectors.EVENT_READ, tell)


def _preload() -> None:
    for module in PRELOADED:
        import_module(module)


def end_with(parent: int) -> None:
    """Make the kernel end this process with its parent. Signals of the terminal do not reach it."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _rename(name: str) -> None:
    """Set the name of this process in lists of processes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def _become(outputs: list[int], module: str, folder: str, environment: dict[str, str]) -> NoReturn:
    """Run ``module`` in this process as a new interpreter would, then end the process."""
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    sys.stdout = steady(None, 1)
    sys.stderr = steady(None, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, "")
    if GUARDED in environment:
        _rename("guard")
        guard()
        exec(ENDURE)
    _rename(Path(environment[LOG]).stem)
    _forget_parent()
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    end_program(code)


def _forget_parent() -> None:
    """Set what a new interpreter would have set by itself, or read from its variables."""
    import numpy
    import torch

    from rl.host.platform import set_heap

    set_heap()
    gc.set_threshold(*COLLECT_AT)
    random.seed()
    numpy.random.seed()
    torch.set_num_threads(1)
