"""Costs of the folders of a test run as a table, and in CONTRIBUTING.md.

scripts/test.sh --durations-json costs.json
python -m tests.durations costs.json costs.json.pure [--write]
"""

import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

from tests.durations.plugin import add

COLUMNS = ("tests", "seconds", "programs", "forked", "engines", "processes", "peak_mib")
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
PLACE = re.compile(r"(?<=<!-- costs -->\n).*?(?=<!-- end of costs -->)", re.DOTALL)


def table(runs: list[dict]) -> str:
    """Return the table of files that ``--durations-json`` wrote, the slowest folder first."""
    folders = defaultdict[str, Counter[str]](Counter)
    total = Counter[str]()
    for run in runs:
        for name, costs in run["folders"].items():
            add(folders[name], costs)
            add(total, costs)
    lines = ["| folder | tests | seconds | programs | forked | engines | processes | peak MiB |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, costs in sorted(folders.items(), key=lambda row: -row[1]["seconds"]):
        lines.append(_line(f"`{name}`", costs))
    lines.append(_line("all", total))
    return "\n".join(lines)


def _line(name: str, costs: Counter[str]) -> str:
    values = (f"{round(costs[column]):,}" for column in COLUMNS)
    return f"| {name} | {' | '.join(values)} |"


def main(arguments: list[str]) -> None:
    files = [each for each in arguments if each != "--write"]
    text = table([json.loads(Path(file).read_text()) for file in files])
    print(text)
    if "--write" in arguments:
        page, places = PLACE.subn(lambda _: f"{text}\n", PAGE.read_text())
        assert places == 1, f"{PAGE} has {places} places for the table, between two comments"
        PAGE.write_text(page)


if __name__ == "__main__":
    main(sys.argv[1:])
