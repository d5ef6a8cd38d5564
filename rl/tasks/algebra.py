"""Equality of expressions in LaTeX by math-verify, in a process that can be ended.

The process runs this file. It keeps a worker, which the kernel ends after ``LIMIT_S`` seconds of
processor time, also within one long operation on integers. A fork replaces the worker.
"""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from functools import lru_cache

LIMIT_S = 2.0
"""Processor time of one comparison, in seconds. The expressions are not equal after it."""
MEMORY = 4 << 30  # of a worker, in bytes


def is_same_expression(answer: str, reference: str) -> bool:
    """Whether math-verify finds an expression equal to the reference.

    May be called in any thread. The first call in a process starts the process that compares.
    """
    process, lock = _comparer(os.getpid())  # a fork must not share the pipes
    assert process.stdin is not None and process.stdout is not None
    with lock:
        reply = b""
        try:
            process.stdin.write(json.dumps([answer, reference]).encode() + b"\n")
            reply = process.stdout.readline()
        except BrokenPipeError:  # the process was killed
            pass
        finally:
            if not reply:  # also if the call was interrupted, and its reply is still to come
                process.kill()
                process.wait()
                _comparer.cache_clear()
    return reply == b"true\n"


@lru_cache(maxsize=1)
def _comparer(owner: int) -> tuple[subprocess.Popen[bytes], threading.Lock]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-P", __file__]
    process = subprocess.Popen(
        command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
    )
    return process, threading.Lock()


def serve() -> None:
    """Answer the requests on standard input until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the process ends with its standard input
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # math-verify warns that its own timeouts are off. They are signals to Python code.
    logging.disable()
    replies = os.dup(1)
    os.dup2(2, 1)  # the parser of LaTeX may print
    _compare(r"\frac{x}{2}+x^2", r"x^2+0.5x")  # what it imports and caches, workers have
    while True:
        worker = os.fork()
        if worker == 0:
            _work(replies)
        if os.waitpid(worker, 0)[1] == 0:
            return
        os.write(replies, b"false\n")


def _work(replies: int) -> None:
    while line := sys.stdin.buffer.readline():
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        same = _compare(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(replies, json.dumps(same).encode() + b"\n")
    os._exit(0)


def _compare(*pair: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    box = [LatexExtractionConfig(boxed_match_priority=0)]
    options = {"extraction_mode": "first_match", "parsing_timeout": None}
    answer, reference = (parse(rf"\boxed{{{expression}}}", box, **options) for expression in pair)
    return bool(verify(reference, answer, timeout_seconds=None))


if __name__ == "__main__":
    serve()
