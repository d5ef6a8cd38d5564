"""Launcher: freezes a run in its folder, then starts it here or submits it to a cluster.

Exit codes: 0 the run was submitted, or with --wait has finished; 1 failed; 2 the config cannot
work; with --wait for a run on this host, the exit code of the run.
"""

import shlex
import signal
from pathlib import Path

from rl.cli.help import CONFIGS, check_arguments, show_help
from rl.cli.program import as_program
from rl.errors import end_program, nearest, require

PROGRAM = "python -m rl.launch"
PLACES = ("local", "slurm", "kubernetes")
USAGE = f"""\
usage: {PROGRAM} local|slurm|kubernetes --config NAME [--dry-run] [--wait]
       [--FIELD VALUE ...]

Write a run's config and script to its folder, then start the run here or submit it to a cluster.

  local         on this host, in the background
  slurm         as a job on trainer.nodes + generator.nodes nodes; fields slurm.*
  kubernetes    on as many pods; fields kubernetes.*

  --dry-run     write all files to the run folder, print the script, and start nothing
  --wait        wait for the end of the run and show its progress; not for kubernetes
  --output-dir DIR    run folder; by default runs/NAME-TIME, with the files in DIR/launch

  {PROGRAM} local --config quickstart --output-dir runs/first
  {PROGRAM} slurm --config qwen3_8b_2_nodes --slurm.partition NAME --dry-run

{CONFIGS}

exit codes: 0 the run was started or submitted, 1 it could not be, 2 the config cannot work.
With --wait, local: that of the run, which is 0, 1, 2, 75 or 130. With --wait, slurm: 0 the run
finished, 1 it did not, 130 Ctrl-C, after which the run goes on."""


def _launch(arguments: list[str]) -> int:
    command = f"{PROGRAM} {shlex.join(arguments)}"
    flags = {flag for flag in ("--dry-run", "--wait") if flag in arguments}
    target, *rest = [argument for argument in arguments if argument not in flags] or ["--help"]
    program = f"{PROGRAM} {target}"
    show_help([target, *rest], program, USAGE)
    places = ", ".join(PLACES)
    hint = nearest(target, PLACES)
    require(target in PLACES, f"{target!r} is not a place to launch to; {hint}allowed are {places}")
    check_arguments(rest, program)

    # these import torch, which --help does without
    from rl.cli.arguments import parse_config
    from rl.launch.freeze import Launch
    from rl.launch.targets import TARGETS, check
    from rl.observe.owner import claim

    name, config = parse_config(rest, program=program)
    wait = "--wait" in flags
    check(target, config, wait)
    file, render, start = TARGETS[target]
    mount = Path(config.kubernetes.mount)
    is_here = target != "kubernetes" or mount.is_dir()  # else only pods see the run folder
    output_dir = config.output_dir if is_here else ""
    with claim(name, output_dir, resume=config.resume and is_here) as owner:
        home = owner.folder.absolute()
        folder = home if is_here else Path(config.output_dir or mount / home.name)
        launch = Launch(name, config, folder, command, home)
        text = render(launch)
        launch.freeze({file: text})
    if "--dry-run" in flags:
        print(text, end="")
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on a run was started
    return start(launch, wait)


main = as_program(_launch, interrupted="interrupted; the run goes on")


if __name__ == "__main__":
    end_program(main())
