"""Package of a user with configs and a task."""

import pytest


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A user's package with a task and a config of its own."""
    (tmp_path / "shouting").mkdir()
    (tmp_path / "shouting" / "__init__.py").write_text(
        "from dataclasses import dataclass\n"
        "from rl.config import RLConfig\n"
        "from rl.tasks.copy_digits import CopyDigits\n"
        "class Shout(CopyDigits):\n"
        "    @dataclass(kw_only=True, slots=True)\n"
        "    class Config(CopyDigits.Config):\n"
        "        loudness: float = 1.0\n"
        "def loud() -> RLConfig:\n"
        "    return RLConfig(task=Shout.Config(loudness=2.0))\n"
        "def helper():\n"
        "    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "shouting"
