"""Reaction of the job's script to the exit code of the run, on a real Slurm, with a fake run."""

import re
import shlex
from pathlib import Path

import pytest

from rl.cli.arguments import find_config
from rl.launch.freeze import Launch
from rl.launch.slurm import script
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import children_of, command_of, pids_of, until, until_gone


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a run, with a space in its name."""
    return tmp_path / "a run"


def submit(
    cluster: Cluster,
    folder: Path,
    run: str,
    *,
    max_restarts: int = 5,
    real_worker: bool = False,
    node: str = "",
    prelude: str = "",
    commands: dict[str, str] | None = None,
) -> str:
    """A job of the launcher's script, with the bash line ``run`` as its run, which does not end the
    worker itself. ``node`` is the only one that the job may have.

    ``commands`` are lines of bash that precede those of Slurm.
    """
    config = find_config("quickstart")()
    config.slurm.max_restarts = max_restarts
    config.slurm.exclusive = False
    config.slurm.nodelist = node
    config.slurm.environment = {"GREETING": "it's $HOME"}
    config.slurm.prelude = ["export FROM_PRELUDE=loaded", f"PATH='{folder}/bin':$PATH", prelude]
    launch = Launch("stand-in", config, folder, "unused")
    train = folder / "run.sh"
    worker = folder / "worker.sh"
    text = re.sub(r"(?m)^train=.*$", f"train=(bash {shlex.quote(str(train))})", script(launch))
    stand_ins = {} if real_worker else {"node": worker, "python": "bash"}
    for name, value in stand_ins.items():
        text = re.sub(rf"(?m)^{name}=.*$", f"{name}={shlex.quote(str(value))}", text)
    launch.freeze({"job.sh": text})
    (folder / "logs").mkdir(parents=True)
    train.write_text(
        f'attempt=$SLURM_RESTART_COUNT\necho "attempt ${{attempt:=0}} gets $*"\n{run}\n'
    )
    worker.write_text('until [ -e "$1/over" ]; do sleep 0.1; done\n')
    (folder / "bin").mkdir()
    for name, lines in (commands or {}).items():
        path = folder / "bin" / name
        path.write_text(f'#!/bin/bash\n{lines}\nPATH=${{PATH#*:}} exec {name} "$@"\n')
        path.chmod(0o755)
    return cluster.submit(str(launch.files / "job.sh"))


def says(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("logs/*/run.log")))


def log(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("logs/slurm-*.log"))


TOLD = 'trap "echo told; exit 75" USR1'
GOES_ON = '[ "$attempt" = 1 ] || while :; do sleep 0.1; done'
RUNS = {
    "done": "exit 0",
    "failed": "exit 1",
    "config": "exit 2",
    "saved": '[ "$attempt" = 1 ] || exit 75',
    "killed": '[ "$attempt" = 1 ] || { sleep 0.5; kill -9 $$; }',
    "told": f"{TOLD}\n{GOES_ON}",
    "never done": "exit 75",
    "told early": GOES_ON,
    "told at its start": f"{TOLD}\n{GOES_ON}",
    "saved without Slurm's controller": '[ "$attempt" = 1 ] || exit 75',
}
FIRST = '[ "${SLURM_RESTART_COUNT:-0}" = 0 ]'
NO_ANSWER = (
    '[ -e "$0.asked" ] || { touch "$0.asked"; echo "Unable to contact slurm controller" '
    ">&2; exit 1; }"
)
# as srun does before the tasks have started
DROP_A_SIGNAL = 'trap "" USR1; kill -USR1 $PPID; sleep 1; trap - USR1'
OPTIONS = {
    "told early": {"prelude": f"! {FIRST} || kill -USR1 $$"},
    "told at its start": {
        "commands": {"srun": f'! {FIRST} || [[ "$*" != *run.sh ]] || {{ {DROP_A_SIGNAL}; }}'}
    },
    "saved without Slurm's controller": {
        "commands": {"squeue": NO_ANSWER, "scontrol": f'[ "$1" != requeue ] || {NO_ANSWER}'}
    },
}


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """A job of each of RUNS and its folder, side by side: restarts wait for seconds."""
    folders = {name: tmp_path_factory.mktemp("jobs") / "a run" for name in RUNS}
    found = {}
    for name, folder in folders.items():
        run = f"touch '{folder}/config.json'\n{RUNS[name]}"
        job = submit(cluster, folder, run, max_restarts=1, **OPTIONS.get(name, {}))
        found[name] = (job, folder)
    return found


def test_before_its_time_limit_the_run_saves_and_continues_in_another_attempt(cluster, jobs):
    job, folder = jobs["told"]
    until(lambda: "attempt 0" in says(folder), "the run is there")
    cluster.ask("scancel", "--batch", "--signal=USR1", job)  # as Slurm itself does
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED"
    said = says(folder).splitlines()
    assert ("told" in said, said[-1]) == (True, "attempt 1 gets --resume")
    assert "the time limit is near: the run is told to save and leave" in log(folder)


def test_a_signal_before_the_run_starts_is_not_lost(cluster, jobs):
    job, folder = jobs["told early"]
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", log(folder)
    assert says(folder) == "attempt 1 gets \n"
    assert "attempt 0: the time limit is near: the run is not started" in log(folder)


def test_a_signal_while_srun_starts_the_run_is_not_lost(cluster, jobs):
    job, folder = jobs["told at its start"]
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED", log(folder)
    said = [line for line in says(folder).splitlines() if line.startswith(("attempt", "told"))]
    assert said == ["attempt 0 gets ", "told", "attempt 1 gets --resume"]


ENDS = {
    "done": ("COMPLETED", 1),
    "failed": ("FAILED", 1),
    "config": ("FAILED", 1),
    "saved": ("COMPLETED", 2),
    "killed": ("COMPLETED", 2),
    "saved without Slurm's controller": ("COMPLETED", 2),
}
"""State in which each job ends, and its number of attempts."""


def test_a_run_is_restarted_if_it_can_resume_and_not_if_it_failed(cluster, jobs):
    expected = {}
    found = {}
    for name, (state, attempts) in ENDS.items():
        job, folder = jobs[name]
        again = [f"attempt {attempt} gets --resume" for attempt in range(1, attempts)]
        expected[name] = (state, ["attempt 0 gets ", *again])
        ended = cluster.wait_for(job, "COMPLETED", "FAILED")
        begun = [line for line in says(folder).splitlines() if line.startswith("attempt")]
        found[name] = (ended, begun)
    assert found == expected


def test_no_more_attempts_than_allowed(cluster, jobs):
    job, folder = jobs["never done"]
    assert cluster.wait_for(job, "FAILED") == "FAILED"
    assert (cluster.field(job, "Restarts"), cluster.field(job, "ExitCode")) == ("1", "75:0")
    assert "attempt 1: gives up: slurm.max_restarts is 1" in log(folder)
    until_gone(cluster, job)


def test_a_cancelled_job_is_not_started_again(cluster, folder):
    job = submit(cluster, folder, 'trap "exit 75" TERM\nwhile :; do sleep 0.1; done')
    until(lambda: "attempt 0" in says(folder), "the run is there")
    cluster.ask("scancel", job)
    assert cluster.wait_for(job, "CANCELLED", "COMPLETED", "PENDING") == "CANCELLED"
    assert "cancelled, or Slurm itself starts it again" in log(folder)
    until_gone(cluster, job)


def test_a_requeued_job_leaves_no_process_that_outlives_its_shell(cluster, folder):
    stays = '[ "$1" != requeue ] || exit 0'  # the job is not requeued, and its shell waits
    job = submit(cluster, folder, "exit 75", commands={"scontrol": stays})
    until(lambda: "goes back to the queue" in log(folder), "the run has ended")
    # forks of the shell, later ones, have its command line until they execute their own
    shell = min(pid for pid in pids_of(cluster, job) if "/slurm_script" in command_of(pid))
    until(lambda: not children_of(shell), "the shell waits without a child")
    cluster.ask("scancel", job)
    until_gone(cluster, job)


def test_processes_get_the_submitting_shells_environment_and_the_configs(
    cluster, folder, monkeypatch
):
    monkeypatch.setenv("API_TOKEN", "s3cret")
    job = submit(cluster, folder, 'echo "$API_TOKEN, $GREETING, $FROM_PRELUDE, $TILLER_NODES"')
    assert cluster.wait_for(job, "COMPLETED") == "COMPLETED"
    assert re.search(r"s3cret, it's \$HOME, loaded, n\d", says(folder))
    frozen = [path for path in (folder / "launch").iterdir() if b"s3cret" in path.read_bytes()]
    assert frozen == []
    assert "API_TOKEN" in (folder / "launch" / "environment.json").read_text()


def test_jobs_on_one_node_do_not_collide(cluster, tmp_path):
    entries = (
        "until [ $(ls {}/*/logs/*/workers/n1.json | wc -l) = 2 ]; do sleep 0.2; done; cat "
        '"$TILLER_LOGS"/workers/*.json'
    )
    jobs = [
        submit(cluster, tmp_path / name, entries.format(tmp_path), real_worker=True, node="n1")
        for name in ("one", "two")
    ]
    assert [cluster.wait_for(job, "COMPLETED") for job in jobs] == ["COMPLETED"] * 2
    addresses = {re.search(r"tcp://n1:\d+", says(tmp_path / name))[0] for name in ("one", "two")}
    assert len(addresses) == 2
    until_gone(cluster, *jobs)
