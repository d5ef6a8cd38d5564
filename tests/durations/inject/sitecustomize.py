"""Log of the Python processes and vLLM engines that a test run starts.

Python imports this module at the start of each process whose PYTHONPATH has this folder. Processes
with an environment of their own are not seen.
"""

import importlib.abc
import importlib.util
import json
import os
import sys

EVENTS = "TILLER_TEST_EVENTS"
"""Variable with the path of the log."""
ENGINE = "vllm.v1.engine.llm_engine"


def log(kind: str) -> None:
    """Append a line with the command of this process."""
    line = json.dumps({"kind": kind, "pid": os.getpid(), "command": sys.orig_argv})
    descriptor = os.open(os.environ[EVENTS], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def _logged_new(kind: type, *_arguments, **_options):
    if os.environ.get("RANK", "0") == "0" and EVENTS in os.environ:
        log("engine")
    return object.__new__(kind)


class _EngineFinder(importlib.abc.MetaPathFinder):
    """Makes the first rank of each vLLM engine log its start."""

    def find_spec(self, name, path, target=None):
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_wrap(module) -> None:
            execute(module)
            module.LLMEngine.__new__ = _logged_new

        spec.loader.exec_module = execute_and_wrap
        return spec


def _forked() -> None:
    if EVENTS in os.environ:
        log("fork")


def watch() -> None:
    """Log the forks and engines of this process from now on."""
    os.register_at_fork(after_in_child=_forked)
    sys.meta_path.insert(0, _EngineFinder())


if EVENTS in os.environ:
    log("python")
    watch()
