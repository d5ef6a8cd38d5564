"""The server has the routes, messages and fields of the SDK. They are recorded in sdk.json, which
``python -m tests.tinker_sdk.test_schema`` writes from the installed SDK.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECORDED = Path(__file__).with_name("sdk.json")
SCHEMA = Path(__file__).with_name("schema.py")


def installed(python: Path) -> dict:
    """Return routes, messages and fields of the SDK of an interpreter."""
    return json.loads(subprocess.check_output([python, SCHEMA], text=True))


def written(schema: dict) -> str:
    """Return ``schema`` as JSON with a line for each route, message and class."""

    def lines(part):
        if isinstance(part, list):
            return "[\n  " + ",\n  ".join(map(json.dumps, part)) + "\n ]"
        rows = (f"{json.dumps(name)}: {json.dumps(own)}" for name, own in part.items())
        return "{\n  " + ",\n  ".join(rows) + "\n }"

    parts = {name: lines(part) for name, part in schema.items() if name != "version"}
    rows = [f' "version": {json.dumps(schema["version"])}']
    rows += [f" {json.dumps(name)}: {text}" for name, text in parts.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


@pytest.mark.long
def test_the_recorded_schema_is_that_of_the_installed_sdk(sdk):
    found = installed(sdk)
    assert found == json.loads(RECORDED.read_text())


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "scripts"))
    from tinker_env import tinker_python

    RECORDED.write_text(written(installed(tinker_python())))
