"""Command ``tiller``: every program as a sub-command.

Exit codes: those of the program; 2 for an unknown program.
"""

import os
import runpy
import sys
from importlib.metadata import version

from rl.cli.program import begin
from rl.errors import EXIT_CONFIG, nearest

PROGRAMS = {
    "train": "train a model as a config describes, on this host",
    "plan": "print what a run would need and take, without starting it",
    "doctor": "print what is wrong with this host, a config or a run",
    "launch": "start a run in the background, or submit it to Slurm or Kubernetes",
    "evaluate": "print the scores of a run's checkpoint or of a model",
    "view": "show runs in a browser: curves, timelines, rollouts, failures, configs",
    "play": "play an episode of an environment, as a person or with a run's policy",
    "serve": "serve a model or a run's policy with the API of OpenAI",
    "replay": "train recorded steps of a run again, and compare every bit",
    "compare": "find the module in which generator and trainer begin to differ",
    "export": "write a run's checkpoint as a Hugging Face folder",
}
USAGE = """\
usage: tiller PROGRAM ...

{programs}

tiller PROGRAM --help describes a program; tiller PROGRAM is python -m rl.PROGRAM.
tiller --version prints the version."""


def main() -> int:
    """Run the program that the command line names. Return an exit code if it names no program."""
    begin()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(USAGE.format(programs="\n".join(f"  {each:10}{PROGRAMS[each]}" for each in PROGRAMS)))
        return 0
    if name == "--version":
        print(f"tiller {version('tiller-rl')}")
        return 0
    if name not in PROGRAMS:
        hint = nearest(name, PROGRAMS)
        known = ", ".join(PROGRAMS)
        print(f"error: unknown program {name!r}; {hint}there are {known}", file=sys.stderr)
        return EXIT_CONFIG
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # like python -m: for imports of the user's modules
    sys.argv = [sys.argv[0], *arguments]
    runpy.run_module(f"rl.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
