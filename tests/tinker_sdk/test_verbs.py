"""The unmodified SDK trains, samples and saves against a server of a tiny model."""

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
VERBS = Path(__file__).with_name("verbs.py")
TIMEOUT_S = 500.0


def checks() -> list[str]:
    """Return the names of the functions that verbs.py runs, without importing the SDK."""
    tree = ast.parse(VERBS.read_text())
    (listed,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHECKS"
    ]
    return [ast.unparse(each) for each in listed.elts]


@pytest.fixture(scope="module")
def errors(sdk, served, recipes):
    """The traceback of each function, empty if it succeeded."""
    done = subprocess.run(
        [sdk, VERBS, served.url, recipes.BASE],
        cwd=served.folder,
        env=os.environ | recipes.environment(served.folder, served.url),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    rows = map(json.loads, done.stdout.splitlines())
    return {row["name"]: row["error"] for row in rows}


@pytest.mark.parametrize("name", checks())
def test_a_verb(errors, name):
    assert errors[name] == ""
