"""scripts/slurm_dev.sh: a Slurm that behaves as one, and leaves nothing behind."""

import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.slurm.cluster import CANNOT_RUN_HERE, PATIENCE_S, SCRIPT, Cluster
from tests.slurm.jobs import until

WAITS = "trap 'exit 9' USR1; echo ready; while :; do sleep 0.1; done"


@pytest.fixture
def other(cluster: Cluster) -> Iterator[Cluster]:
    """Not up: a cluster of one node for a test to start and to end, beside the shared one."""
    with tempfile.TemporaryDirectory(prefix="slurm") as place:
        other = Cluster(Path(place) / "state", nodes=1)
        yield other
        other.stop()


def waiting(cluster: Cluster) -> subprocess.Popen:
    """A command of run that waits for USR1."""
    command = [SCRIPT, "run", "bash", "-c", WAITS]
    process = subprocess.Popen(command, env=cluster.environment(), stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


def test_every_node_answers_under_its_own_name_and_address(cluster: Cluster):
    nodes = cluster.ask("srun", "-N3", "bash", "-c", "echo $(hostname) $(getent hosts $(hostname))")
    assert sorted(nodes.splitlines()) == [f"n{i} 10.77.0.{i} n{i}" for i in (1, 2, 3)]
    # and takes four ranks on fewer cores
    ranks = cluster.ask("srun", "-N1", "-n4", "hostname").splitlines()
    assert len(ranks) == 4
    assert len({*ranks}) == 1


def test_a_batch_job_writes_its_output_and_exit_code(cluster: Cluster, tmp_path: Path):
    job = cluster.submit("-N2", f"--output={tmp_path}/out", "--wrap", "srun hostname; exit 3")
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "FAILED"
    assert cluster.field(job, "ExitCode") == "3:0"
    assert len({*(tmp_path / "out").read_text().split()}) == 2


def test_a_preempted_job_is_requeued_and_may_soon_run_again(cluster: Cluster, tmp_path: Path):
    script = "echo life ${SLURM_RESTART_COUNT:-0}; [ ${SLURM_RESTART_COUNT:-0} = 1 ] || sleep 1000"
    # its end is seen every 30 s only
    cluster.ask("scontrol", "update", "PartitionName=main", "GraceTime=0")
    whole = ("-N3", "--exclusive")
    output = ("--open-mode=append", f"--output={tmp_path}/low")
    low = cluster.submit(*whole, *output, "--wrap", script)
    cluster.wait_for(low, "RUNNING")
    output = ("-p", "high", f"--output={tmp_path}/high")
    high = cluster.submit(*whole, *output, "--wrap", "srun hostname")
    cluster.wait_for(low, "PENDING")
    cluster.wait_for(high, "COMPLETED")
    starts = datetime.fromisoformat(cluster.field(low, "StartTime"))
    assert starts < datetime.now() + timedelta(seconds=15)
    cluster.start_now(low)
    cluster.wait_for(low, "COMPLETED")
    cluster.ask("scontrol", "update", "PartitionName=main", "GraceTime=30")
    assert re.findall("^life .*", (tmp_path / "low").read_text(), re.M) == ["life 0", "life 1"]
    assert sorted((tmp_path / "high").read_text().split()) == ["n1", "n2", "n3"]


def test_run_hands_on_exit_status_input_folder_and_environment(cluster: Cluster, tmp_path: Path):
    command = [SCRIPT, "run", "bash", "-c", "pwd; cat; echo $WORD; hostname; exit 7"]
    options = {"env": cluster.environment({"WORD": "given"}), "cwd": tmp_path, "input": "read\n"}
    ran = subprocess.run(command, **options, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.stdout.split() == [str(tmp_path), "read", "given", "login"]
    assert ran.returncode == 7


def test_run_hands_on_signals(cluster: Cluster):
    process = waiting(cluster)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=PATIENCE_S) == 9


WRONG = [(), ("start",), ("run",), ("up", "0"), ("up", "many"), ("up", "1", "2"), ("down", "1")]


def test_wrong_arguments_print_the_usage(cluster: Cluster):
    ran = {arguments: cluster.script(*arguments) for arguments in WRONG}
    accepted = {
        arguments: (wrong.returncode, wrong.stderr)
        for arguments, wrong in ran.items()
        if wrong.returncode != 2 or "up [NODES]" not in wrong.stderr
    }
    assert accepted == {}


def test_a_second_up_finds_the_first(cluster: Cluster):
    holder = cluster.holder()
    second = cluster.start()
    assert second.returncode == 0
    assert "up already" in second.stdout
    assert cluster.holder() == holder


def test_without_a_cluster_down_succeeds_run_names_the_remedy_and_other_files_stay(other: Cluster):
    down = other.stop()
    run = other.run("true")
    assert (down.returncode, run.returncode) == (0, 1)
    assert "no Slurm is up" in down.stdout
    assert "scripts/slurm_dev.sh up" in run.stderr
    other.folder.mkdir()
    (other.folder / "thesis").touch()
    refused = other.start()
    assert refused.returncode == 1
    assert "SLURM_DEV_DIR" in refused.stderr
    assert (other.folder / "thesis").exists()


def test_up_closes_the_files_of_its_caller(other: Cluster):
    read, write = os.pipe()
    command = [SCRIPT, "up", "1"]
    options = {"env": other.environment(), "pass_fds": [write], "timeout": PATIENCE_S}
    subprocess.run(command, **options, check=True, capture_output=True)
    os.close(write)
    at_end, _, _ = select.select([read], [], [], PATIENCE_S)
    assert at_end, "a process of the cluster still holds the caller's pipe"
    os.close(read)


def test_down_ends_running_jobs_and_commands(other: Cluster):
    assert other.start().returncode == 0
    network = other.network()
    job = other.submit("--output=/dev/null", "--wrap", "touch /dev/shm/of_a_job; srun sleep 1000")
    other.wait_for(job, "RUNNING")
    command = waiting(other)
    until(lambda: other.ask("ls", "/dev/shm") == "of_a_job", "the job runs")
    assert other.stop().returncode == 0
    assert other.traces(network) == []
    assert command.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    assert "of_a_job" not in os.listdir("/dev/shm")


def test_a_killed_holder_ends_the_cluster_and_up_starts_a_new_one(other: Cluster):
    assert other.start().returncode == 0
    network = other.network()
    assert len(other.pids()) > 3
    other.submit("--output=/dev/null", "--wrap", "srun sleep 1000")
    os.kill(other.holder(), signal.SIGKILL)
    until(lambda: not other.pids(network), "all processes have ended")
    assert other.run("true").returncode == 1
    assert other.start().returncode == 0
    assert other.ask("srun", "hostname") == "n1"


@pytest.mark.parametrize(
    ("tools", "status", "reason"),
    [
        (["munged", "slurmctld", "slurmd", "srun"], 1, "the disk is full"),
        (["unshare"], CANNOT_RUN_HERE, "no right to make namespaces"),
    ],
)
def test_a_failed_start_cleans_up_and_prints_the_cause(
    other: Cluster, tmp_path: Path, tools: list[str], status: int, reason: str
):
    for tool in tools:
        (tmp_path / tool).write_text("#!/bin/sh\necho the disk is full >&2\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    failed = other.script("up", "1", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert failed.returncode == status
    assert reason in failed.stderr
    assert not other.folder.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="whoever runs these tests is such a user")
def test_a_user_other_than_root_can_start_a_cluster(cluster: Cluster):
    packages = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiller"
    with tempfile.TemporaryDirectory(prefix="slurm") as place:
        if packages.exists():
            shutil.copytree(packages, f"{place}/tiller", symlinks=True)
        script = shutil.copy(SCRIPT, place)
        subprocess.run(["chown", "-R", "65534:65534", place], check=True)
        environment = os.environ | {"SLURM_DEV_DIR": f"{place}/state", "XDG_CACHE_HOME": place}

        def as_user(*arguments: str) -> subprocess.CompletedProcess[str]:
            user = {"user": 65534, "group": 65534, "extra_groups": []}
            options = {"env": environment, "cwd": place, "timeout": PATIENCE_S, **user}
            return subprocess.run([script, *arguments], capture_output=True, text=True, **options)

        started = as_user("up", "2")
        if started.returncode == CANNOT_RUN_HERE:
            pytest.skip(started.stderr.strip().splitlines()[-1])
        assert started.returncode == 0, started.stderr
        try:
            ran = as_user("run", "srun", "-N2", "bash", "-c", "echo $(hostname) $(id -u)")
        finally:
            assert as_user("down").returncode == 0
        assert sorted(ran.stdout.splitlines()) == ["n1 65534", "n2 65534"], ran.stderr
        assert not os.path.exists(environment["SLURM_DEV_DIR"])
