"""The program: what a run would be, from its config alone.

Exit codes: 0 it can work, 2 it cannot, or the config is none.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import asdict
from io import StringIO
from typing import Any

from rl.cli import load_config, parse_config
from rl.errors import EXIT_CONFIG, ConfigError, end_program
from rl.plan.diff import changes
from rl.plan.plan import Plan
from rl.plan.report import describe, describe_changes

PROGRAM = "python -m rl.plan"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan, or the difference to another config; returns the exit code."""
    parser = argparse.ArgumentParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--diff",
        metavar="OTHER",
        help="say in which fields config OTHER differs, and what that means",
    )
    own, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & {*rest}:
        parser.print_help()
    output = StringIO()
    try:
        with redirect_stderr(output) if own.json else nullcontext():
            name, config = parse_config(rest, program=PROGRAM)
        if own.diff:
            return _print_changes(name, config, own.diff, as_json=own.json)
        plan = Plan(config)
    except ConfigError as error:
        return _refuse([str(error)], as_json=own.json)
    except SystemExit as end:  # the command line could not be read
        if own.json and end.code:
            return _refuse([_unboxed(output.getvalue())], as_json=True)
        return int(end.code or 0)
    print(json.dumps({"config": name} | plan.as_json()) if own.json else describe(name, plan))
    return 0 if plan.feasible else EXIT_CONFIG


def _print_changes(name: str, config: Any, other: str, *, as_json: bool) -> int:
    found = changes(config, load_config(other)[1])
    rows = {"config": name, "other": other, "changes": [asdict(change) for change in found]}
    print(json.dumps(rows) if as_json else describe_changes(name, other, found))
    return 0


def _refuse(errors: list[str], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"feasible": False, "errors": errors}))
    else:
        print("\n".join(f"error: {error}" for error in errors), file=sys.stderr)
    return EXIT_CONFIG


def _unboxed(text: str) -> str:
    """Return tyro's message without the box around it."""
    return " ".join(re.sub(r"[│╭╮╰╯─+]|-{3,}", " ", text).split())


if __name__ == "__main__":
    end_program(main())
