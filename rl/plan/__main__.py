"""Program that plans a run from its config alone.

Exit codes: 0 the run can work, 2 it cannot or the config is invalid.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import asdict
from io import StringIO

from rl.cli import load_config, parse_rl_config
from rl.errors import EXIT_CONFIG, ConfigError, end_program
from rl.plan.diff import changes
from rl.plan.plan import Plan
from rl.plan.report import describe, describe_changes

PROGRAM = "python -m rl.plan"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan, or the difference to another config. Return the exit code."""
    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--diff", metavar="OTHER", help="list the fields in which config OTHER differs"
    )
    own, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & {*rest}:
        parser.print_help()
    output = StringIO()
    try:
        with redirect_stderr(output) if own.json else nullcontext():
            name, config = parse_rl_config(rest, program=PROGRAM)
        if own.diff:
            found = changes(config, load_config(own.diff)[1])
            rows = {"config": name, "other": own.diff, "changes": [*map(asdict, found)]}
            print(json.dumps(rows) if own.json else describe_changes(name, own.diff, found))
            return 0
        plan = Plan(config)
    except ConfigError as error:
        return _refuse(str(error), as_json=own.json)
    except SystemExit as end:  # the command line could not be read
        if own.json and end.code:
            return _refuse(_unboxed(output.getvalue()), as_json=True)
        return int(end.code or 0)
    print(json.dumps({"config": name} | plan.as_json()) if own.json else describe(name, plan))
    return 0 if plan.feasible else EXIT_CONFIG


def _refuse(error: str, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"feasible": False, "errors": [error]}))
    else:
        print(f"error: {error}", file=sys.stderr)
    return EXIT_CONFIG


def _unboxed(text: str) -> str:
    """Return tyro's message without the box around it."""
    return " ".join(re.sub(r"[│╭╮╰╯─+]|-{3,}", " ", text).split())


if __name__ == "__main__":
    end_program(main())
