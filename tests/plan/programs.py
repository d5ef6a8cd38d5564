"""Calls of ``python -m rl.plan`` in this process."""

import json

from rl.plan.__main__ import main


def planned(capsys, *arguments: str) -> tuple[int, dict]:
    """Return the exit code and the plan."""
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)
