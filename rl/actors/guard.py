"""Ends what a process leaves behind. Hosts runs this text in a fresh interpreter, which knows no
other module of ours.

A subreaper becomes the parent of every process below it whose own parent has ended, also of one
that has left its process group or session. So the guard finds them all, and kills them when the
guarded process or the run has ended.
"""

import contextlib
import ctypes
import os
import signal
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END_S = 10.0  # for killed processes to end
SIGNALS = (signal.SIGTERM, signal.SIGCHLD)


def guard() -> None:
    """Go on in a child process.

    This process waits until that one ends, or the run, and exits after all below it.
    """
    prctl = ctypes.CDLL(None).prctl
    own = os.getpid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    guarded = os.fork()
    if guarded == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if os.getppid() != own:
            os._exit(1)
        return
    ended: dict[int, int] = {}
    code = 128 + signal.SIGTERM
    while guarded not in ended and signal.sigwait(SIGNALS) == signal.SIGCHLD:
        ended = reap()
    if guarded in ended:
        code = os.waitstatus_to_exitcode(ended[guarded])
    ends = time.monotonic() + END_S
    while (pids := children()) and time.monotonic() < ends:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended, or has become another user's
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        reap()
    os._exit(code if code >= 0 else 128 - code)


def children() -> list[int]:
    """Processes whose parent is this one."""
    return [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and parent_of(name) == os.getpid()
    ]


def parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(
                file.read().rpartition(b")")[2].split()[1]
            )  # its name may hold spaces and brackets
    except OSError:  # it has ended
        return 0


def reap() -> dict[int, int]:
    """Wait status by pid of children that have ended."""
    ended = dict[int, int]()
    with contextlib.suppress(ChildProcessError):  # there are none left
        while (pid_and_status := os.waitpid(-1, os.WNOHANG))[0]:
            ended |= [pid_and_status]
    return ended
