"""The program: parse, provision, run, exit code.

Exit codes: 0 done, 1 failed, 2 the config or its input cannot work, 75 to be started again, 128 + n
ended by signal n.
"""

from rl.cli.help import CONFIGS, check_arguments, show_help
from rl.cli.program import as_program
from rl.errors import end_program

PROGRAM = "python -m rl.train"
USAGE = f"""\
usage: {{program}} --config NAME [--FIELD VALUE ...]

Train a model as a config describes, on this host; what the run writes is in its run folder.

  {{program}} --config quickstart --seed 1
  {{program}} --config gsm8k_jsonl --model.hf_path DIR --task.path FILE

{CONFIGS}

common options:
{{common}}

Ctrl-C finishes the step, saves a checkpoint and exits; a second Ctrl-C quits immediately.

exit codes: 0 done, 1 failed, 2 the config or its input cannot work,
75 ended early and can be resumed (SIGTERM, SIGUSR1, SIGHUP, a lost node), 130 Ctrl-C"""


def _train(arguments: list[str]) -> int:
    show_help(arguments, PROGRAM, USAGE)
    check_arguments(arguments, PROGRAM)
    # these import torch, which --help does without
    from rl.actors import fork_server

    fork_server.start()
    from rl.cli.training_run import run

    return run(arguments, program=PROGRAM)


main = as_program(_train, interrupted="interrupted before the run started")


if __name__ == "__main__":
    end_program(main())
