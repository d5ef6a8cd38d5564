"""Program that finds what is wrong with this host, and with a config or a run folder.

Exit codes: 0 nothing stands in the way, 2 something does.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict

from rl.cli.help import CONFIGS, asks_for_help, show_help
from rl.cli.program import as_program
from rl.doctor.findings import Finding
from rl.errors import EXIT_CONFIG, counted, end_program, printable

PROGRAM = "python -m rl.doctor"
USAGE = f"""\
usage: {{program}} [RUN | --config NAME] [--FIELD VALUE ...] [--json]

Print what is wrong with this host and, if given, with a config and its input or with the run in
folder RUN, each with a fix. Starts no process of a run, writes nothing, and needs no GPU.

  --json  print one JSON object as the last line

  {{program}}
  {{program}} --config quickstart --rollout.max_staleness 1
  {{program}} runs/first

{CONFIGS}

exit codes: 0 nothing stands in the way, there may be warnings; 1 failed; 2 something does"""


@as_program
def main(arguments: list[str]) -> int:
    """Print the findings. Return the exit code."""
    show_help(arguments, PROGRAM, USAGE)
    rest = [argument for argument in arguments if argument != "--json"]
    if asks_for_help(rest):
        from rl.cli.arguments import parse_config

        parse_config(rest, program=PROGRAM)  # prints the help and exits
    from rl.doctor.host import check_host, this_host  # imports torch, which --help does without

    host = this_host()
    findings = list[Finding]()
    _report(findings, check_host(host))
    if rest:
        from rl.doctor.examine import check_given  # imports all of Tiller, which takes seconds

        _report(findings, check_given(host, rest, PROGRAM))
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = sum(finding.severity == "warning" for finding in findings)
    counts = f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"
    print(counts if errors or warnings else "nothing found")
    if "--json" in arguments:
        print(json.dumps({"ok": not errors, "findings": [*map(asdict, findings)]}))
    return EXIT_CONFIG if errors else 0


def _report(earlier: list[Finding], findings: Iterator[Finding]) -> None:
    """Print findings as they are made, and add them to ``earlier``. Omits repetitions."""
    for finding in findings:
        if finding.what not in [known.what for known in earlier]:
            print(printable(finding), flush=True)
            earlier += [finding] if finding.severity != "note" else []


if __name__ == "__main__":
    end_program(main())
