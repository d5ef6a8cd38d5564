"""Print the costs of each folder of a test run as a table: ``python -m tests.durations FILE``."""

import json
import sys
from collections import Counter
from pathlib import Path

COLUMNS = ("tests", "seconds", "programs", "engines", "processes", "peak_mib")


def table(costs: dict) -> str:
    """Return the table of a file that ``--durations-json`` wrote, the slowest folder first."""
    total = Counter[str]()
    lines = ["| folder | tests | seconds | programs | engines | processes | peak MiB |"]
    lines.append("|---|---|---|---|---|---|---|")
    folders = sorted(costs["folders"].items(), key=lambda row: -row[1]["seconds"])
    for name, row in folders:
        lines.append(_line(f"`{name}`", row))
        total.update({column: row.get(column, 0) for column in COLUMNS[:-1]})
        total["peak_mib"] = max(total["peak_mib"], row.get("peak_mib", 0))
    lines.append(_line("all", total))
    return "\n".join(lines)


def _line(name: str, row: dict) -> str:
    values = (f"{round(row.get(column, 0)):,}" for column in COLUMNS)
    return f"| {name} | {' | '.join(values)} |"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
