"""Tool that runs a policy's Python programs in a sandbox."""

from collections.abc import Callable

from rl.sandbox.limits import Limits, Result
from rl.sandbox.sandbox import open_sandbox


def code_tool(*, limits: Limits | None = None, unsafe: bool = False) -> Callable[[str], str]:
    """Return the tool ``python(code)`` for :class:`rl.tasks.tools.Tools`.

    Each call runs a program of its own in a sandbox, within ``limits``. Its answer has what the
    program printed, the end of its error, and the limit that it ran into.

    Raises ConfigError if no sandbox works on this host, unless ``unsafe`` is True: programs can
    then read and change whatever the run can.
    """
    sandbox = open_sandbox(unsafe=unsafe)
    most = limits or Limits()

    def python(code: str) -> str:
        """Run a Python program, and return what it prints. It has the standard library, and no
        network.
        """
        return _as_text(sandbox.run(code, limits=most), most)

    return python


def _as_text(result: Result, limits: Limits) -> str:
    parts = [result.stdout, result.stderr]
    if result.limit is not None:
        parts.append(f"(the program ran into its limit of {result.limit}: {limits})")
    elif result.exit_code:
        parts.append(f"(exit code {result.exit_code})")
    return "\n".join(part.rstrip("\n") for part in parts if part) or "(the program printed nothing)"
