"""Table of plan and rehearsal for the docs: ``python -m tests.plan.rehearsal.table`` prints that of
layouts, with ``--all`` that of whole models.
"""

import sys

from tests.plan.rehearsal.layouts import LAYOUTS, WHOLE
from tests.plan.rehearsal.rehearsals import Rehearsals, planned_bytes

GIB = 1 << 30


def main() -> None:
    """Print one row of Markdown for each layout, or for each whole model."""
    rows = WHOLE if sys.argv[1:] == ["--all"] else LAYOUTS
    print("| layout | plan, GiB | rehearsed, GiB | plan / rehearsed |\n|---|---|---|---|")
    rehearsals = Rehearsals()
    for name, arguments in rows.items():
        found = rehearsals.of(arguments)
        planned = planned_bytes(found["planned"])
        sizes = f"{planned / GIB:.2f} | {found['peak'] / GIB:.2f}"
        print(f"| {name} | {sizes} | {planned / found['peak']:.2f} |", flush=True)
    rehearsals.close()


if __name__ == "__main__":
    main()
