"""Names of metrics that docs/run-folder.md lists."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "run-folder.md"


def documented() -> list[str]:
    """Return the names of the table of metrics; parts in capitals are placeholders."""
    section = PAGE.read_text().split("## Metrics\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def undocumented(names: Iterable[str]) -> set[str]:
    """Return the names without a row in the table."""
    patterns = [re.sub(r"[A-Z]+", "[^/]+", name) for name in documented()]
    known = re.compile("|".join(patterns))
    plain = {re.sub("^critic/", "", name): name for name in names}
    return {
        name
        for own, name in plain.items()
        if not known.fullmatch(own) and not known.fullmatch(f"trainer/{own}")
    }
