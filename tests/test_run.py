"""What a run refuses before it has a folder."""

import os

import pytest

from rl.observe.owner import FolderOwner
from rl.train import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--generator.nodes", "2"], "trainer.nodes=1 and generator.nodes=2 need 3 nodes; this run has 1: start it by"),
        (
            ["--hardware.device", "h100", "--hardware.gpus_per_node", "8"],
            "hardware.device is 'h100'; this host computes",
        ),
    ],
)
def test_hosts_that_are_not_those_of_the_config(arguments, message, tmp_path, capsys):
    code = main(["--config", "quickstart", *arguments, "--output-dir", str(tmp_path / "run")])
    assert (code, message in capsys.readouterr().err) == (2, True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        (lambda digits: False, "evaluation.prompts is 256, but CopyDigits holds out no prompts; set it to 0"),
        (lambda digits: 1 / 0, "data: CopyDigits.eval_prompts(256) raised ZeroDivisionError: division by zero"),
    ],
    ids=["empty", "raises"],
)
def test_held_out_prompts_that_cannot_be_had(held_out, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rl.tasks.copy_digits.is_held_out", held_out)
    code = main(["--config", "quickstart", "--output-dir", str(tmp_path / "run")])
    assert (code, message in capsys.readouterr().err) == (2, True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("resume", "message"), [([], "already holds a run; add --resume"), (["--resume"], "holds no run; name the folder")]
)
def test_a_folder_that_is_not_what_it_is_taken_for(resume, message, tmp_path, capsys):
    if not resume:
        (tmp_path / "config.json").touch()
    code = main(["--config", "quickstart", *resume, "--output-dir", str(tmp_path)])
    assert (code, message in capsys.readouterr().err) == (2, True)


def test_nodes_that_do_not_come_up_end_the_attempt_and_not_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TILLER_NODES", "n1 n2")
    code = main(["--config", "quickstart", "--deadlines.start", "0.5", "--output-dir", str(tmp_path / "run")])
    assert (code, "no worker came up within 0 s on n1, n2" in capsys.readouterr().err) == (75, True)


@pytest.mark.parametrize(("nodes", "code"), [("", 2), ("here", 75)])
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_folder_that_another_run_writes_to_is_refused(nodes, code, resume, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TILLER_NODES", nodes)
    arguments = ["--config", "quickstart", *resume, "--deadlines.start", "0.5", "--output-dir", str(tmp_path)]
    with FolderOwner(tmp_path):
        if resume:
            (tmp_path / "config.json").touch()
        before = {path.name for path in tmp_path.iterdir()}
        assert main(arguments) == code
        assert f"{tmp_path} is in use by process {os.getpid()} on " in capsys.readouterr().err
        assert {path.name for path in tmp_path.iterdir()} == before
