"""``python -m rl.launch`` as a user calls it."""

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from rl.cli.arguments import parse_config
from rl.config.frozen import frozen
from rl.launch.__main__ import PLACES, main
from rl.launch.targets import TARGETS
from rl.observe.owner import FolderOwner
from tests import warm
from tests.kit.runs import TINY

H100 = ["--hardware.device", "h100", "--hardware.gpus_per_node", "8"]
SMALL = [*TINY, "--rollout.reward_workers", "0"]


@pytest.fixture
def launch(monkeypatch, capsys):
    """Return a function that runs the launcher here: exit code, output and errors."""
    monkeypatch.setenv("PATH", "/nowhere")

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as end:  # after a help text
            code = end.code
        return code, *capsys.readouterr()

    return run


def test_a_dry_run_prints_what_it_writes_and_starts_nothing(launch, tmp_path):
    folder = tmp_path / "run"
    code, printed, errors = launch(
        "slurm", *TINY, "--seed", "7", "--dry-run", "--output-dir", str(folder)
    )
    assert (code, printed, errors) == (0, (folder / "launch" / "job.sh").read_text(), "")
    assert [path.name for path in folder.iterdir()] == ["launch"]
    file = folder / "launch" / "config.json"
    name, config = parse_config(["--config", str(file)], program="here")
    assert (name, config.seed) == ("quickstart", 7)
    assert frozen(config) == json.loads(file.read_text())["config"]


@pytest.mark.parametrize("asked", ["", "/runs of pods/first"])
def test_a_launch_to_pods_writes_nothing_to_the_path_of_their_volume(
    asked, launch, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    mount = asked and "/runs of pods"
    options = ["--kubernetes.image", "tiller:1", "--kubernetes.claim", "runs", "--dry-run"]
    options += ["--kubernetes.mount", mount, "--output-dir", asked] if asked else []
    code, printed, errors = launch("kubernetes", *TINY, *options)
    assert (code, errors) == (0, "")
    (home,) = (tmp_path / "runs").iterdir()
    assert printed == (home / "launch" / "manifests.json").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert not Path(mount or "/runs").exists()
    folder = asked or f"/runs/{home.name}"
    config, _, job = json.loads(printed)["items"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = shlex.split(container["command"][-1])
    assert command[command.index("--output-dir") + 1] == folder
    assert config["data"]["config.json"] == (home / "launch" / "config.json").read_text()


@pytest.mark.long
@pytest.mark.parametrize("name", ["sft_jsonl", "dpo_jsonl", "reward_model_jsonl"])
def test_runs_of_every_trainer_are_launched(name, chat_model, launch, tmp_path):
    model = ("--model.hf_path", str(chat_model), "--model.max_seq_len", "128")
    arguments = ("--config", name, *model, "--task.max_tokens", "96", "--steps", "7")
    for place in ("slurm", "local"):
        folder = tmp_path / place
        code, printed, errors = launch(place, *arguments, "--dry-run", "--output-dir", str(folder))
        assert (code, errors) == (0, "")
        assert "-m rl.train --config" in printed
        frozen_file = folder / "launch" / "config.json"
        assert parse_config(["--config", str(frozen_file)], program="here")[1].steps == 7
    small = ("--hardware.memory_gib", "0.5", "--output-dir", str(tmp_path / "small"))
    code, _, errors = launch("slurm", *arguments, *small)
    assert (code, "GiB of the 0.5 that it has" in errors) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["mars", *TINY], 2, "'mars' is not a place to launch to; allowed are local, slurm, ku"),
        (["slurm"], 2, "--config NAME is missing"),
        (["slurm", *TINY, "--slurm.partion", "x"], 2, "did you mean --slurm.partition"),
        (["local", *TINY, "--generator.nodes", "1"], 2, "need 2 nodes; this run has 1: start it"),
        (["local", *TINY, *H100], 2, "this host computes on cpu"),
        (["slurm", *TINY, "--generator.tensor_parallel_degree", "3"], 2, "l_degree is 3"),
        (["slurm", "--config", "qwen3_14b", "--hardware.memory_gib", "36"], 2, "GiB of the 36.0"),
        (["slurm", *TINY], 1, "sbatch is not on PATH: launch from a node of a Slurm cluster, or -"),
        (["kubernetes", *TINY, "--wait"], 2, "--wait: not for kubernetes"),
        (["kubernetes", *TINY], 2, "kubernetes.image is empty"),
    ],
)
def test_a_run_that_cannot_be_launched_is_refused_by_a_message(
    arguments, code, message, launch, tmp_path
):
    folder = tmp_path / "run"
    exit_code, _, errors = launch(*arguments, "--output-dir", str(folder))
    assert (exit_code, errors.startswith("error: "), message in errors) == (code, True, True), (
        errors
    )
    assert code != 2 or not folder.exists()


ALL = ("local|slurm|kubernetes --config NAME", "--dry-run", "--wait", "exit codes:", "--help-all")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(([], ALL), (["--help"], ALL), (["slurm", "--help"], ALL), (["local", "--help"], ALL)),
        (["slurm", "--config", "quickstart", "--help"], ("slurm --config quickstart",)),
    ],
)
def test_help_has_one_usage_which_names_the_place(launch, arguments, words):
    code, printed, errors = launch(*arguments)
    assert (code, errors) == (0, "")
    assert printed.startswith(f"usage: python -m rl.launch {words[0]}")
    assert [word for word in words if word not in printed] == []


def test_every_place_can_be_launched_to():
    assert (*TARGETS,) == PLACES


def test_a_folder_that_holds_a_run_requires_resume(launch, tmp_path):
    (tmp_path / "config.json").touch()
    code, _, errors = launch("slurm", *TINY, "--output-dir", str(tmp_path))
    assert (code, "already holds a run; add --resume" in errors) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_files_of_a_running_run_are_not_overwritten(launch, tmp_path):
    (tmp_path / "config.json").touch()
    with FolderOwner(tmp_path):
        code, _, errors = launch("slurm", *TINY, "--resume", "--output-dir", str(tmp_path))
        assert (code, f"{tmp_path} is in use by process {os.getpid()} on " in errors) == (2, True)
        assert {path.name for path in tmp_path.iterdir()} == {"config.json", "owner.json"}


def test_a_folder_that_cannot_be_written_is_named(launch, tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    code, _, errors = launch("slurm", *TINY, "--dry-run", "--output-dir", str(folder))
    said = f"error: {folder / 'owner.json'}: cannot be written: "
    assert (code, said in errors) == (1, True)


@pytest.mark.long
def test_a_local_run_continues_in_the_background_and_saves_on_sigterm(tmp_path):
    folder = tmp_path / "run"
    options = ("--steps", "5000", "--output-dir", folder)
    done = warm.run("rl.launch", "local", *SMALL, *options, timeout=600)
    assert done.returncode == 0, done.stderr
    pid = int(re.search(r"kill (\d+)", done.stdout)[1])
    metrics = folder / "metrics.jsonl"
    ends = time.monotonic() + 600
    while not metrics.exists():
        assert time.monotonic() < ends, (folder / "logs" / "run.log").read_text()
        time.sleep(0.1)
    os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < ends, (folder / "logs" / "run.log").read_text()
        time.sleep(0.1)
    assert "interrupted by SIGTERM after step" in (folder / "logs" / "run.log").read_text()


def test_wait_shows_the_output_and_returns_the_exit_code_of_the_run(tmp_path):
    missing = ["--config", "gsm8k_jsonl", "--task.path", str(tmp_path / "none.jsonl")]
    options = ("--output-dir", tmp_path / "run", "--wait")
    done = warm.run("rl.launch", "local", *missing, *options, timeout=600)
    assert (done.returncode, done.stderr.startswith("error: ")) == (2, True), done.stderr
