"""Configs that a run refuses before it has a folder."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from configs.quickstart import quickstart
from rl.algorithms.advantages import Advantages, GroupAdvantage
from rl.config import PolicyGradientConfig, RLConfig
from rl.config.frozen import frozen
from rl.environments.task import Task
from rl.observe.owner import FolderOwner
from rl.tasks.copy_digits import CopyDigits
from rl.train import main

QUICKSTART = Path(__file__).parents[2] / "scripts" / "quickstart.sh"


@pytest.fixture
def refused(tmp_path, capsys):
    """Return a function that starts a run with arguments and a folder that does not exist. It
    checks that the program prints ``message`` and exits with ``code``, and makes no folder.
    """

    def check(arguments: str, message: str, code: int = 2) -> None:
        folder = tmp_path / "run"
        assert main([*arguments.split(), "--output-dir", str(folder)]) == code
        assert message in capsys.readouterr().err
        assert not folder.exists()

    return check


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--generator.nodes 2",
            "trainer.nodes=1 and generator.nodes=2 need 3 nodes; this run has 1: start it by",
        ),
        (
            "--hardware.device h100 --hardware.gpus_per_node 8",
            "hardware.device is 'h100'; this host computes",
        ),
    ],
)
def test_hosts_that_are_not_those_of_the_config(arguments, message, refused):
    refused(f"--config quickstart {arguments}", message)


def test_a_resume_with_fewer_steps_than_the_checkpoint(tmp_path, capsys):
    checkpoint = tmp_path / "checkpoints" / "step-6"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").touch()
    content = json.dumps({"name": "quickstart", "config": frozen(quickstart())})
    (tmp_path / "config.json").write_text(content)
    arguments = ["--config", "quickstart", "--steps", "4", "--output-dir", str(tmp_path)]
    assert main([*arguments, "--resume"]) == 2
    said = capsys.readouterr().err
    assert "the run takes 4 steps" in said
    assert "has a checkpoint of step 6; raise steps, or start a new run" in said
    assert (tmp_path / "config.json").read_text() == content


@pytest.mark.parametrize("place", ["run", "run/inside", "itself"])
def test_a_run_folder_behind_a_link_that_leads_nowhere(place, tmp_path, capsys):
    (tmp_path / "run").symlink_to("missing")
    (tmp_path / "itself").symlink_to("itself")
    assert main(["--config", "quickstart", "--output-dir", str(tmp_path / place)]) == 2
    said = capsys.readouterr().err
    target = "itself" if place == "itself" else "missing"
    assert f"is a link to {target}, which is missing; make that folder" in said


def test_a_host_whose_interfaces_are_all_down():
    unshared = ["unshare", "--net", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*unshared, "true"]).returncode:
        pytest.skip("no right to make namespaces")
    code = "from rl.session.hardware import HardwareConfig; HardwareConfig().require_here()"
    done = subprocess.run([*unshared, sys.executable, "-c", code], capture_output=True, text=True)
    said = "ConfigError: network: a connection to 127.0.0.1 fails"
    assert said in done.stderr
    assert done.stderr.rstrip().endswith("run: ip link set lo up")


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        (
            lambda digits: False,
            "evaluation.prompts is 256, but CopyDigits holds out no prompts; set it to 0",
        ),
        (
            lambda digits: 1 / 0,
            "task: CopyDigits.eval_prompts(256) raised ZeroDivisionError: division by zero",
        ),
    ],
    ids=["empty", "raises"],
)
def test_held_out_prompts_that_cannot_be_had(held_out, message, monkeypatch, refused):
    monkeypatch.setattr("rl.tasks.copy_digits.is_held_out", held_out)
    refused("--config quickstart", message)


class Misshapen(GroupAdvantage):
    """Gives one advantage a completion."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupAdvantage.Config):
        pass

    def __call__(self, scored):
        return Advantages(scored.rewards)


class Moody(CopyDigits):
    """Fails where ``fails``, with underscores for spaces, says."""

    @dataclass(kw_only=True, slots=True)
    class Config(CopyDigits.Config):
        fails: str = ""

    def __init__(self, config, *, seed, model):
        if config.fails == "constructor":
            raise SystemExit("no data today")
        if config.fails == "no_tokenizer":
            Task.__init__(self, config, seed=seed, model=model)
        elif config.fails != "no_super":
            super().__init__(config, seed=seed, model=model)

    def prompt(self, prompt_id):
        if self.config.fails == "prompt" and prompt_id == 7:
            return None
        if self.config.fails == "Ctrl-C":
            raise KeyboardInterrupt
        return super().prompt(prompt_id)


def moody() -> RLConfig:
    return replace(quickstart(), task=Moody.Config())


def misshapen() -> RLConfig:
    return replace(quickstart(), algorithm=PolicyGradientConfig(advantage=Misshapen.Config()))


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("constructor", "in __init__: SystemExit: no data today; correct it there"),
        ("no_super", "task: Moody has no shape; its constructor must call super()"),
        ("no_tokenizer", "its constructor must call self.set_tokenizer(tokenizer"),
        ("prompt", "task: Moody.prompt(7) is None; expected a Prompt"),
    ],
)
def test_a_task_of_the_users_own_is_tried_before_anything_starts(fails, message, refused):
    refused(f"--config {__name__}.moody --task.fails {fails}", message)


def test_an_advantage_of_the_users_own_is_tried_before_anything_starts(refused):
    message = "Misshapen (advantages) returned float32 [256] on cpu; expected a tensor, float32 [5"
    refused(f"--config {__name__}.misshapen", message)


def test_ctrl_c_in_a_task_leaves_nothing(refused):
    message = "interrupted before the run started"
    refused(f"--config {__name__}.moody --task.fails Ctrl-C", message, 130)


@pytest.mark.parametrize(
    ("resume", "message"),
    [([], "already holds a run; add --resume"), (["--resume"], "holds no run; name the folder")],
)
def test_a_folder_that_is_not_what_it_is_taken_for(resume, message, tmp_path, capsys):
    if not resume:
        (tmp_path / "config.json").touch()
    code = main(["--config", "quickstart", *resume, "--output-dir", str(tmp_path)])
    assert (code, message in capsys.readouterr().err) == (2, True)


def test_nodes_that_do_not_come_up_end_the_attempt_and_not_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TILLER_NODES", "n1 n2")
    quick = ["--config", "quickstart", "--deadlines.start", "0.5"]
    assert main([*quick, "--output-dir", str(tmp_path / "run")]) == 75
    assert "no worker came up within 0 s on n1, n2" in capsys.readouterr().err


@pytest.mark.parametrize(("nodes", "code"), [("", 2), ("here", 75)])
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_folder_that_another_run_writes_to_is_refused(
    nodes, code, resume, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TILLER_NODES", nodes)
    quick = ["--config", "quickstart", "--deadlines.start", "0.5", *resume]
    arguments = [*quick, "--output-dir", str(tmp_path)]
    with FolderOwner(tmp_path):
        if resume:
            content = json.dumps({"name": "quickstart", "config": frozen(quickstart())})
            (tmp_path / "config.json").write_text(content)
        before = {path.name for path in tmp_path.iterdir()}
        assert main(arguments) == code
        assert f"{tmp_path} is in use by process {os.getpid()} on " in capsys.readouterr().err
        assert {path.name for path in tmp_path.iterdir()} == before


def test_the_quickstart_runs_where_its_caller_stands(tmp_path):
    repository = tmp_path / "repository"
    here = tmp_path / "here"
    for path, text in {
        repository / "scripts" / "quickstart.sh": QUICKSTART.read_text(),
        repository / "scripts" / "setup.sh": "#!/bin/sh\n",
        repository / ".venv" / "bin" / "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        here / "out" / "config.json": "{",
        here / "configs" / "__init__.py": "raise RuntimeError",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    command = ["../repository/scripts/quickstart.sh", "--resume", "--output-dir", "out"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "error: --resume: out/config.json: " in done.stderr) == (2, True), (
        done.stderr
    )
