"""A real run on a real Slurm: over several nodes, and past whatever ends its attempts (C4, C6)."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.kit.runs import Run, digest
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import (
    NODES,
    ON_ONE_HOST,
    QUICKSTART,
    SHORT,
    SHORT_STEPS,
    Job,
    until,
    until_gone,
    worker_of,
)


@pytest.fixture(scope="module")
def uninterrupted(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run in one attempt, seen to its end by the launcher."""
    return Job(cluster, tmp_path_factory.mktemp("uninterrupted") / "run", *QUICKSTART, wait=560)


@pytest.mark.long
def test_a_trainer_on_two_nodes_trains_what_a_generator_on_a_third_samples(cluster, tmp_path):
    job = Job(cluster, tmp_path / "run", *SHORT, wait=560)
    assert job.launched.returncode == 0, job.launched.stdout + job.log()
    assert f"job {job.id}: COMPLETED" in job.launched.stdout
    assert f"step {SHORT_STEPS}/{SHORT_STEPS}" in job.launched.stdout
    errors = job.metric("logprob/error_max")
    assert (len(errors), max(errors) <= 1e-4) == (SHORT_STEPS, True), errors
    logs = job.folder / "logs" / f"{job.id}.0"
    names = "trainer-0 trainer-1 generator-0-0 reward-0-0 controller run node-n1 node-n2 node-n3"
    assert {f"{name}.log" for name in names.split()} <= {path.name for path in logs.iterdir()}
    assert (logs / "push.txt").read_text().startswith("transport: tcp")
    until_gone(cluster, job.id)


@pytest.mark.long
def test_preemption_and_a_lost_node_cost_attempts_and_change_no_weight(
    uninterrupted, cluster, tmp_path
):
    job = Job(cluster, tmp_path / "run", *QUICKSTART, "--trainer.checkpoint.async_mode", "async")
    job.trains(0)
    placed = {
        name: {*job.processes(f"/{name}.log\0").values()}
        for name in ("trainer-0", "trainer-1", "generator-0-0")
    }
    assert placed == {"trainer-0": {"n1"}, "trainer-1": {"n2"}, "generator-0-0": {"n3"}}

    urgent = cluster.submit(
        "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1"
    )
    until(lambda: job.restarts() == 1, "it makes way")
    left = int(re.search(r"interrupted by SIGTERM after step (\d+)", job.says(0))[1])
    cluster.wait_for(urgent, "COMPLETED")
    assert left == job.resumed(1)

    job.trains(1)
    os.kill(worker_of(job, "n2"), signal.SIGKILL)
    until(lambda: job.restarts() == 2, "it starts again without the node's worker")
    assert "node n2 is lost: its worker was ended by SIGKILL" in job.says(1)
    assert job.resumed(2) == left  # the step that the first signal saved

    assert cluster.wait_for(job.id, "COMPLETED", "FAILED", timeout=300) == "COMPLETED"
    assert job.summary()["policy_digest"] == uninterrupted.summary()["policy_digest"]
    assert job.rewards() == uninterrupted.rewards()

    cluster.ask("scontrol", "requeue", job.id)
    until(lambda: "nothing is left to do" in job.log(), "a finished run is not run again")
    assert cluster.wait_for(job.id, "COMPLETED")
    assert not (job.folder / "logs" / f"{job.id}.3").exists()
    until_gone(cluster, job.id)


@pytest.mark.long
def test_a_cancelled_run_ends_for_good_and_leaves_nothing(cluster, tmp_path):
    job = Job(cluster, tmp_path / "run", *QUICKSTART)
    job.trains(0)
    cluster.ask("scancel", job.id)
    assert cluster.wait_for(job.id, "CANCELLED", "COMPLETED", "FAILED", "PENDING") == "CANCELLED"
    until_gone(cluster, job.id)
    assert job.restarts() == 0


@pytest.mark.long
def test_a_run_longer_than_its_time_limit_ends_with_the_weights_that_it_has_on_one_host(
    cluster, tmp_path: Path
):
    longer = ("--config", "quickstart", "--steps", "700")
    whole = Run(*longer, *ON_ONE_HOST, folder=tmp_path / "whole")
    assert whole.wait() == 0, whole.stderr
    limit = ["--slurm.time", "2", "--slurm.warn_s", "30"]  # a start takes up to a minute
    job = Job(cluster, tmp_path / "run", *longer, *ON_ONE_HOST, *NODES, *limit, wait=1800)
    assert job.launched.returncode == 0, job.log()
    assert job.restarts() >= 1
    assert "the time limit is near" in job.log()
    assert job.summary()["policy_digest"] == digest(whole)
    assert job.rewards() == [row["reward/mean"] for row in whole.metrics()]


@pytest.mark.long
def test_a_rank_that_dies_on_another_node_is_started_again_within_the_attempt(
    uninterrupted, cluster, tmp_path
):
    job = Job(cluster, tmp_path / "run", *QUICKSTART)
    job.trains(0)
    for name, said in (
        ("generator-0-0", "generator-0 rank 0 on n3"),
        ("trainer-1", "trainer rank 1 on n2"),
    ):
        before = job.steps()
        for pid in job.processes(f"/{name}.log\0"):
            os.kill(pid, signal.SIGKILL)
        until(lambda said=said: said in job.says(0), f"the death of {name} is told")
        until(lambda before=before: job.steps() > before + 3, "the run goes on", 300)
    assert cluster.wait_for(job.id, "COMPLETED", "FAILED", timeout=300) == "COMPLETED"
    assert job.restarts() == 0
    assert job.summary()["policy_digest"] == uninterrupted.summary()["policy_digest"]
