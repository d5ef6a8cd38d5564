"""Apply each break to a copy of the tree and run the tests that are named beside it.

    python -m tests.breaks [--tree FOLDER] [PART OF A FILE'S NAME ...]

Prints the test that finds each break, and exits with 1 if a break is not found. FOLDER is another
checkout, which is broken and tested instead. "missing" means that it lacks the line of a break.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.breaks.breaks import BREAKS, Break

ROOT = Path(__file__).parents[2]
COPIED = ("rl", "configs", "scripts", "tests", "docs", "pyproject.toml", "constraints.txt")
TIMEOUT_S = 1200.0
A_TEST_FAILED = 1
"""Exit code of pytest."""
NOT_FOUND = "NOT FOUND"
MISSING = "missing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER")
    parser.add_argument("names", nargs="*", help="parts of the names of the files to break")
    given = parser.parse_args()
    chosen = [each for each in BREAKS if any(name in each.file for name in given.names or [""])]
    missed = 0
    for each in chosen:
        started = time.monotonic()
        result = tried(each, given.tree)
        missed += result in (NOT_FOUND, MISSING)
        seconds = time.monotonic() - started
        print(f"{seconds:5.0f} s  {each.file}: {each.new[:60]}\n         {result}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} breaks found")
    return int(missed > 0)


def changed(each: Break, tree: Path) -> str:
    """Return the text of the file with the break, or MISSING."""
    text = (tree / each.file).read_text()
    return text.replace(each.old, each.new) if text.count(each.old) == 1 else MISSING


def tried(each: Break, tree: Path) -> str:
    """Return the name of the test that finds a break, NOT_FOUND or MISSING."""
    text = changed(each, tree)
    if text == MISSING:
        return MISSING
    with tempfile.TemporaryDirectory(prefix="tiller-break-") as folder:
        for name in COPIED:
            copy = shutil.copytree if (tree / name).is_dir() else shutil.copy
            copy(tree / name, Path(folder, name))
        for page in tree.glob("*.md"):
            shutil.copy(page, folder)
        Path(folder, each.file).write_text(text)
        marks = "long" if each.long else "not long"
        tests = [f"tests/{name}" for name in each.found_by.split()]
        tests = [name for name in tests if Path(folder, name).exists()]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-m", marks, *tests],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed and done.returncode == A_TEST_FAILED else NOT_FOUND


if __name__ == "__main__":
    sys.exit(main())
