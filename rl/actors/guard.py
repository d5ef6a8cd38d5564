"""Ends all processes that a process has started. Hosts runs this file's text in a new interpreter,
which must not import other modules of this package.

The guard is a subreaper: it becomes the parent of every process below it that loses its parent,
also of one that has left its process group or session. It kills all of them when the guarded
process or the run has ended, and after SIGTERM of its parent. It ignores SIGTERM of others.
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
    """Return in a child process.

    This process waits until the child or the run ends, kills all processes below it, and exits.
    """
    prctl = ctypes.CDLL(None).prctl
    guard_pid = os.getpid()
    parent = os.getppid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    guarded = os.fork()
    if guarded == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if os.getppid() != guard_pid:
            os._exit(1)
        return
    ended: dict[int, int] = {}
    code = 128 + signal.SIGTERM
    told = False
    while guarded not in ended and not told:
        received = signal.sigwaitinfo(SIGNALS)
        if received.si_signo == signal.SIGCHLD:
            ended = reap()
        else:
            told = received.si_pid == parent or os.getppid() != parent
    if guarded in ended:
        code = os.waitstatus_to_exitcode(ended[guarded])
    ends = time.monotonic() + END_S
    while (pids := children()) and time.monotonic() < ends:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        reap()
    os._exit(code if code >= 0 else 128 - code)


def children() -> list[int]:
    """Return the child processes of this process."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if parent_of(pid) == os.getpid()]


def parent_of(pid: int) -> int:
    """Return the parent's pid; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in brackets, may have spaces and brackets itself.
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:  # it has ended
        return 0


def reap() -> dict[int, int]:
    """Return the wait status, by pid, of children that have ended."""
    ended = dict[int, int]()
    with contextlib.suppress(ChildProcessError):  # no children remain
        while (pid_and_status := os.waitpid(-1, os.WNOHANG))[0]:
            ended |= [pid_and_status]
    return ended
