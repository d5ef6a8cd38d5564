"""The launcher follows a job while Slurm does not always answer."""

import os

import pytest

from rl.errors import RunError
from rl.launch import slurm
from tests.launch.test_scripts import launch_of, on_three_nodes


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Return a function that follows a job whose ``squeue`` runs the given lines of bash."""

    def follow(lines: str) -> int:
        (tmp_path / "squeue").write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(slurm, "POLL_S", 0.01)
        return slurm.follow(launch_of(on_three_nodes(), tmp_path), "7")

    return follow


NO_ANSWER = 'echo "Unable to contact slurm controller" >&2; exit 1'


def test_following_survives_one_failure_of_squeue(follow, capsys):
    assert (
        follow(f'[ -e "$0.asked" ] || {{ touch "$0.asked"; {NO_ANSWER}; }}; echo COMPLETED') == 1
    )  # without a mark
    assert capsys.readouterr().out == "job 7: COMPLETED\n"


def test_following_ends_after_minutes_without_an_answer(follow, monkeypatch):
    monkeypatch.setattr(slurm, "NO_ANSWER_S", 0.1)
    with pytest.raises(RunError, match="Unable to contact slurm controller"):
        follow(NO_ANSWER)
