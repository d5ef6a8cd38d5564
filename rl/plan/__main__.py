"""Program that plans a run from its config alone.

Exit codes: 0 the run can work, 2 it cannot or the config is invalid.
"""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rl.cli.help import CONFIGS, check_arguments, show_help
from rl.cli.program import as_program
from rl.errors import EXIT_CONFIG, ConfigError, end_program, require

if TYPE_CHECKING:
    from rl.config import RunConfig

PROGRAM = "python -m rl.plan"
USAGE = f"""\
usage: {{program}} --config NAME [--json] [--diff OTHER] [--rehearse [--rank R]] [--FIELD VALUE ...]

Print where each rank of a run would be, what it would hold in memory, how long a step would take,
and whether the run can work. A plan starts nothing and needs no GPU. Memory is in GiB (2^30 bytes).

  --json        print one JSON object, with sizes in bytes and times in seconds
  --diff OTHER  print no plan but the fields in which OTHER differs, and whether they change the
                numbers of a run; OTHER is the name of a config or the config.json of a run
  --rehearse    print no plan: run two steps of the real trainer of each model, and steps of a
                generator's model, on a GPU without numbers, and print their memory, collectives
                and waits, and whether CUDA graphs can capture the generator; needs no GPU
  --rank R      rank that is rehearsed, of the models that have it; 0 by default

  {{program}} --config quickstart --rollout.max_staleness 1
  {{program}} --config quickstart --diff runs/first/config.json

{CONFIGS}

exit codes: 0 the run can work, or the difference was printed; 1 failed; 2 the run cannot work"""


@as_program
def main(arguments: list[str]) -> int:
    """Print the plan, or the difference to another config. Return the exit code."""
    show_help(arguments, PROGRAM, USAGE)
    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--diff", metavar="OTHER")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--rank", type=int)
    options, rest = parser.parse_known_args(arguments)
    if not options.json:
        check_arguments(rest, PROGRAM)

    # these import torch, which --help does without
    from rl.cli.arguments import load_config, parse_config
    from rl.plan.plan import Plan
    from rl.plan.report import changes, describe, describe_changes
    from rl.validation.folders import check_numbers

    try:
        name, config = parse_config(rest, program=PROGRAM)
        if options.diff:
            diff = changes(config, load_config(options.diff)[1])
            rows = {"config": name, "other": options.diff, "changes": [*map(asdict, diff)]}
            print(json.dumps(rows) if options.json else describe_changes(name, options.diff, diff))
            return 0
        if options.rehearse:
            return _rehearse(config, rest, rank=options.rank, as_json=options.json)
        require(options.rank is None, "--rank needs --rehearse")
        check_numbers(config)
        plan = Plan(config)
    except ConfigError as error:
        if not options.json:
            raise
        print(json.dumps({"feasible": False, "errors": [str(error)]}))
        return EXIT_CONFIG
    print(json.dumps({"config": name} | plan.as_json()) if options.json else describe(name, plan))
    return 0 if plan.feasible else EXIT_CONFIG


def _rehearse(config: "RunConfig", arguments: list[str], *, rank: int | None, as_json: bool) -> int:
    from rl.plan.planned_run import PlannedRun
    from rl.plan.rehearsal.start import errors_of, rehearsal
    from rl.plan.report import describe_rehearsal

    run = PlannedRun(config)
    result = rehearsal(run, arguments, rank=rank or 0)
    errors = errors_of(result, run)
    rows = {"feasible": not errors, "errors": errors, **result}
    print(json.dumps(rows) if as_json else describe_rehearsal(result, run, errors))
    return EXIT_CONFIG if errors else 0


if __name__ == "__main__":
    end_program(main())
