"""The program: parse, provision, run, exit code.

Exit codes: 0 done, 1 failed, 2 the config or its input cannot work, 75 to be started again, 128 + n
ended by signal n.
"""

import sys
from collections.abc import Sequence

from rl.errors import end_program
from rl.help import CONFIGS, check_arguments, quick_help
from rl.program import exit_code

PROGRAM = "python -m rl.train"
USAGE = f"""\
usage: {{program}} --config NAME [--FIELD VALUE ...]

Train a model as a config describes, on this host; what the run writes is in its run folder.

  {{program}} --config quickstart --seed 1
  {{program}} --config gsm8k_jsonl --model.hf_path DIR --task.path FILE

{CONFIGS}

common options:
{{common}}

Ctrl-C finishes the step, saves a checkpoint and leaves; a second Ctrl-C leaves at once.

exit codes: 0 done, 1 failed, 2 the config or its input cannot work,
75 ended early and can be resumed (SIGTERM, SIGUSR1, SIGHUP, a lost node), 130 Ctrl-C"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one training; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: _train(given), interrupted="interrupted before the run started")


def _train(arguments: list[str]) -> int:
    if text := quick_help(arguments, PROGRAM, USAGE):
        print(text)
        return 0
    check_arguments(arguments, PROGRAM)
    # these import torch, which --help does without
    from rl.actors import fork_server

    fork_server.start()
    from rl.run import run

    return run(arguments, program=PROGRAM)


if __name__ == "__main__":
    end_program(main())
