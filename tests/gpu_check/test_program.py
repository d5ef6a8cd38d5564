"""The program of the checks: a check that hangs or dies, the file, Ctrl-C, a host without GPU."""

import json
import os
import sys
from pathlib import Path

import pytest

from rl.cli.arguments import parse_config
from rl.model.shape import shape_of
from rl.plan.speed import sizes_of
from rl.types.deadlines import DeadlineConfig
from rl.validation import validate
from scripts.gpu_check import __main__ as program
from scripts.gpu_check import report
from scripts.gpu_check.checks import CHECKS, WIDTH, Check
from scripts.gpu_check.processes import marked, run_check
from scripts.gpu_check.runs import devices, failure_of
from scripts.gpu_check.setting import Setting
from scripts.gpu_check.verdicts import Verdict
from tests import warm

HANGS = """
import subprocess, sys, time
print("waiting for rank 1", flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""
DIES = """
import os, sys
print("loading kernels from", os.readlink("/proc/self/fd/0"), flush=True)
os.kill(os.getpid(), 11)
"""


def check(seconds: float) -> Check:
    return Check(name="stand-in", what="", function="", seconds=seconds)


def verdict_of(code: str, folder: Path, seconds: float) -> Verdict:
    command = [sys.executable, "-c", code]
    return run_check(check(seconds), command, folder / "logs", device="cpu")


def test_a_check_that_hangs_is_ended_with_all_its_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 987654321)  # a mark of its own
    verdict = verdict_of(HANGS, tmp_path, seconds=4.0)
    assert verdict.wrong == (
        f"did not end within 4 s; the last line of {tmp_path}/logs/log is: waiting for rank 1"
    )
    assert marked("987654321-stand-in") == []


def test_a_check_that_dies_says_how(tmp_path):
    verdict = verdict_of(DIES, tmp_path, seconds=60.0)
    assert verdict.wrong == (
        "its process was ended by signal 11 without a result; the last line of "
        f"{tmp_path}/logs/log is: loading kernels from /dev/null"
    )


@pytest.mark.long
def test_a_check_prints_its_line_and_writes_the_file(tmp_path):
    command = ["scripts.gpu_check", "--device", "cpu", "--only", "push-cuda_ipc"]
    files = ["--json", tmp_path / "out", "--logs", tmp_path / "logs"]
    done = warm.run(*command, *files, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    _, line, end = done.stdout.splitlines()
    assert line.startswith("skipped push-cuda_ipc ")
    assert line.endswith(" s  needs a GPU")
    assert end == f"0 FAIL, 0 ok, 1 skipped; mail {tmp_path}/out and {tmp_path}/out.md"
    written = json.loads((tmp_path / "out").read_text())
    (row,) = written["checks"]
    assert (row["name"], row["state"], row["skipped"]) == (
        "push-cuda_ipc",
        "skipped",
        "needs a GPU",
    )
    assert written["packages"]["torch"].startswith("2.13.0")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs the program with verdicts by the names of the checks."""

    def run(verdicts: dict, *options: str) -> tuple[int, list[str], dict]:
        def stand_in(check, command, folder, *, device):
            verdict = verdicts.get(check.name, Verdict(said="fine", numbers={"a": 1.0}))
            verdict = verdict(folder) if callable(verdict) else verdict
            if isinstance(verdict, Verdict):
                return verdict
            raise verdict

        monkeypatch.setattr(program, "run_check", stand_in)
        monkeypatch.setattr("signal.signal", lambda *_: None)
        path = tmp_path / "out"
        files = ["--json", str(path), "--logs", str(tmp_path / "logs")]
        code = program.main(["--device", "cpu", *files, *options])
        return code, capsys.readouterr().out.splitlines(), json.loads(path.read_text())

    return run


def test_a_check_that_fails_does_not_end_the_others(run):
    code, lines, written = run({"push-rdma": Verdict(wrong="a digest differs")})
    assert code == 1
    assert f"FAIL    {'push-rdma':<{WIDTH}}     0 s  a digest differs" in lines
    assert lines[-1].startswith(f"1 FAIL, {len(CHECKS) - 1} ok, 0 skipped; mail ")
    assert [each["name"] for each in written["checks"]] == [each.name for each in CHECKS]
    assert written["checks"][0]["numbers"] == {"a": 1.0}


def test_the_report_has_what_a_reader_elsewhere_needs(run, tmp_path, monkeypatch):
    """The log of a rank that fails, versions and variables without secrets; failures come first."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("VLLM_API_KEY", "hidden")

    def fail(folder: Path) -> Verdict:
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "rank.log").write_text("first\n" * 99 + "CUDA error: illegal access\n")
        return Verdict(wrong="the process died | twice")

    _, _, written = run({"graphs": fail})
    (failed,) = (line for line in written["checks"] if line["state"] == "FAIL")
    end = failed["logs"]["logs/rank.log"]
    assert end.endswith("first\nCUDA error: illegal access")
    assert end.count("\n") == report.KEPT_LINES - 1
    assert written["variables"]["NCCL_DEBUG"] == "INFO"
    page = (tmp_path / "out.md").read_text()
    assert "hidden" not in page + json.dumps(written)
    rows = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| ")]
    assert rows[1:3] == [["| FAIL", "graphs"], ["| ok", "host"]]
    for text in ("the process died \\| twice", end, "NCCL_DEBUG=INFO", "--only graphs", "torch 2."):
        assert text in page


def test_checks_go_on_without_the_terminal(tmp_path, capfd):
    assert program.main(["--detach", "--list", "--json", str(tmp_path / "out.json")]) == 0
    pid = int(capfd.readouterr().out.split()[1])
    assert os.getsid(pid) == pid
    assert os.waitpid(pid, 0) == (pid, 0)
    lines = (tmp_path / "out.log").read_text().splitlines()
    assert [line.split()[0] for line in lines] == [check.name for check in CHECKS]


def test_the_deadlines_of_a_run_end_before_the_limit_of_its_check():
    deadlines = DeadlineConfig()
    assert Setting(device="cuda", folder=Path()).session().deadlines == deadlines
    limits = [check.seconds for check in CHECKS if check.name != "host"]
    assert min(limits) > deadlines.start + deadlines.call


def test_a_run_that_is_interrupted_keeps_its_lines(run):
    code, _, written = run({"push-rdma": KeyboardInterrupt()}, "--only", "push")
    assert written["ended"] == ""
    assert code == 130
    assert [each["name"] for each in written["checks"]] == ["push-shared_memory", "push-cuda_ipc"]


def test_checks_are_chosen_by_the_beginning_of_their_names(run, capsys):
    _, lines, _ = run({}, "--only", "offload", "parity-float32")
    assert [line.split()[1] for line in lines[1:3]] == ["offload", "offload-graphs"]
    assert lines[3].split()[1] == "parity-float32-flex"
    assert program.main(["--only", "sped"]) == 2
    assert "--only sped is no check; there are host, engine-float32" in capsys.readouterr().err


def test_a_host_without_a_gpu_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(program, "_gpus", lambda: 0)
    assert program.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: this host has no GPU that torch can use; python -m rl.doctor")


def test_checks_that_need_more_gpus_are_skipped(run, monkeypatch):
    monkeypatch.setattr(program, "_gpus", lambda: 1)
    monkeypatch.setattr(report, "names_of_gpus", lambda: (["H100"], "580.65.06"))
    _, lines, written = run({}, "--device", "cuda", "--only", "grpo")
    assert [line.split()[:2] for line in lines[1:3]] == [["ok", "grpo"], ["skipped", "grpo-2-gpus"]]
    assert written["checks"][1]["skipped"] == "needs 2 GPUs, and this host has 1"
    assert (written["gpus"], written["driver"]) == (["H100"], "580.65.06")


def test_every_check_exists():
    assert [check.name for check in CHECKS if not callable(check.load())] == []


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_run_of_a_gpu_has_a_config_that_can_work(gpus):
    hardware = ["--hardware.device", "h100", "--hardware.gpus_per_node", str(gpus)]
    given = ["--config", "scripts.gpu_check.run_configs.copying_0_6b", *devices(gpus), *hardware]
    _, config = parse_config(given, program="test")
    validate(config)
    assert 0.4e9 < sizes_of(shape_of(config.model), fuse_qkv=True).total < 0.6e9


def test_a_run_that_fails_says_why(tmp_path):
    setting = Setting(device="cpu", folder=tmp_path)
    assert failure_of(setting, 0) == ""
    assert failure_of(setting, 1) == "the run ended with exit code 1: see its log"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "failure.json").write_text('{"error": "OutOfMemoryError: 2 GiB"}')
    found = failure_of(setting, 1)
    assert found == "the run ended with exit code 1: OutOfMemoryError: 2 GiB"
