"""The quickstart learns, under one rank and under many."""

import signal

import numpy as np
import pytest

from tests.e2e.pipelines import EXPERTS
from tests.kit.pages import undocumented
from tests.kit.runs import QUICK_STEPS, QUICKSTART, TINY, Run, words


def rise(run: Run) -> tuple[float, float]:
    """Return the mean rewards of the first five and of the last five steps."""
    rewards = [row["reward/mean"] for row in run.metrics()]
    return sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5


@pytest.fixture(scope="module")
def replicas(tmp_path_factory) -> Run:
    """A lockstep run of two generators: one is killed, a third joins, all but one leave."""
    # any generator answers any prompt
    free = ("--generator.replicas", "2", "--rollout.pipeline", "asynchronous")
    run = Run(*QUICKSTART, *free, folder=tmp_path_factory.mktemp("learning") / "run")
    run.until_step(1)
    assert run.strike("generator-1", signal.SIGKILL)
    (run.folder / "replicas").write_text("3")
    run.until_said("warning: generator-1 rank 0, ")
    for name in ("generator-1", "generator-2"):
        run.until_said(f"warning: {name} has joined")
    (run.folder / "replicas").write_text("1")
    run.until_said("warning: generator-1 leaves")
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    return run


@pytest.mark.long
def test_generators_die_join_and_leave_while_training_goes_on(replicas):
    restarts = replicas.metrics()[-1]["restarts/generators"]
    assert replicas.json("summary.json")["restarts"] == restarts == 1
    events = replicas.lines("events.jsonl")
    told = [(event["kind"], event.get("process")) for event in events]
    away = events[told.index(("lost", "generator-1")) : told.index(("joined", "generator-1"))]
    assert [event for event in away if event["kind"] == "metrics"], "training waited for it"
    for number in range(3):
        assert (replicas.folder / "logs" / f"generator-{number}-0.log").exists()
    assert [len(row["trained_now"]) for row in replicas.lines("ledger.jsonl")] == [32] * QUICK_STEPS


METRICS = (
    "loss/mean trainer/grad_norm entropy/mean timing/generate timing/train tokens_per_s "
    "advantage/std generator/queue_max generator/running_mean memory/peak memory/resident "
    "trainer/tflop"
)
FILES = (
    f"curves.png events.jsonl digests.jsonl rollouts/step-{QUICK_STEPS}.parquet "
    f"logs/trainer-0.log logs/generator-0-0.log checkpoints/step-{QUICK_STEPS}"
)


def test_reward_climbs_and_the_run_folder_tells_everything(replicas):
    run = replicas
    first, last = rise(run)
    assert first < 0.1
    assert last > 0.25
    rows = run.metrics()
    assert not undocumented({name for row in rows for name in row})
    steps = [(step, step) for step in range(1, QUICK_STEPS + 1)]
    assert [(row["step"], row["policy_version"]) for row in rows] == steps
    for name in METRICS.split():
        assert all(isinstance(row[name], float) for row in rows), name
    errors = sorted(row["logprob/error_max"] for row in rows)  # lag 0: trainer and generator agree
    assert errors[len(errors) // 2] <= 1e-5
    # the worst token of all steps: where q or k nearly vanish, their norm magnifies rounding
    assert errors[-1] <= 1e-4
    summary = run.json("summary.json")
    assert summary["steps"] == run.json("config.json")["config"]["steps"] == QUICK_STEPS
    assert summary["eval/prompts"] == 256
    assert summary["eval/reward_mean"] > 0.25
    assert len(summary["policy_digest"]) == 64
    assert [name for name in FILES.split() if not (run.folder / name).exists()] == []
    assert not (run.folder / "failure.json").exists()
    _, shown = run.stdout.split("evaluating on held-out data\n")
    assert shown.split()[:2] == ["eval/exact_match", f"{summary['eval/exact_match']:.4g}"]


def test_the_log_of_a_rank_names_its_layout_its_parameters_and_its_loads(replicas):
    logs = replicas.folder / "logs"
    trainer = (logs / "trainer-0.log").read_text()
    assert "rank 0 of 1, one rank; 107,968 parameters, of which 107,968 are here" in trainer
    assert "weights of the start of the run, policy version 0" in trainer
    assert f"saved checkpoint {QUICK_STEPS} in " in trainer
    generator = (logs / "generator-0-0.log").read_text()
    of_rank = "rank 0 of 1; 107,968 parameters of float32; CPU threads: 1; memory at most "
    assert of_rank in generator
    assert "reads weights over shared_memory as generator 0" in generator


def test_recorded_rollouts_have_the_trainers_log_probs(replicas):
    rollouts = replicas.rollouts()
    assert len(rollouts) == QUICK_STEPS * 32 * 8
    sequences = [sequence for rollout in rollouts for sequence in rollout["sequences"]]
    named = ("sampled", "logprobs", "trainer_logprobs", "advantages", "entropy")
    sampled, generator, trainer, advantages, entropy = (
        np.concatenate([sequence[name] for sequence in sequences]) for name in named
    )
    assert np.abs(trainer - generator)[sampled].max() <= 1e-4
    assert (entropy[sampled] > 0).all()
    assert not any(values[~sampled].any() for values in (trainer, advantages, entropy))


SHARDS = "--trainer.parallelism.data_parallel_shard_degree 2 --generator.tensor_parallel_degree 2"


@pytest.mark.long
def test_every_layout_learns_the_same(tmp_path):
    many = words(f"--steps 30 {SHARDS} --trainer.parallelism.tensor_parallel_degree 2 --quiet")
    run = Run("--config", "quickstart", *many, folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    first, last = rise(run)
    assert last > 2.5 * first
    assert max(row["logprob/error_max"] for row in run.metrics()) <= 1e-5
    assert run.stdout == ""


@pytest.mark.long
@pytest.mark.parametrize("replay", ["none", "generator"])
def test_a_mixture_of_experts_generates_as_it_was_trained(tmp_path, replay):
    many = words(f"{SHARDS} --trainer.parallelism.expert_parallel_degree 2 --steps 6")
    replays = ("--trainer.router_replay", replay)
    run = Run(*TINY, *EXPERTS, *many, *replays, folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert [row["policy_version"] for row in run.metrics()] == [*range(1, 7)]
    assert max(row["logprob/error_max"] for row in run.metrics()) <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize("staleness", ["0", "4"])
@pytest.mark.parametrize("replay", ["none", "generator"])
def test_a_mixture_of_experts_learns(tmp_path, replay, staleness):
    options = ("--rollout.max_staleness", staleness, "--trainer.router_replay", replay)
    run = Run("--config", "quickstart", *EXPERTS, *options, folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert run.json("summary.json")["eval/exact_match"] > 0.9
    (sequence,) = run.rollouts()[-1]["sequences"]
    assert ("experts" in sequence) == (replay == "generator")
    if staleness == "0":
        assert max(row["logprob/error_max"] for row in run.metrics()) <= 1e-4


@pytest.mark.long
def test_a_hybrid_learns(tmp_path):
    run = Run(*words("--config quickstart --model.family qwen3_5_text"), folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert run.json("summary.json")["eval/exact_match"] > 0.8
    assert max(row["logprob/error_max"] for row in run.metrics()) <= 1e-4


@pytest.mark.long
def test_one_generator_learns_the_same(finished, replicas):
    assert rise(finished(*QUICKSTART))[1] == pytest.approx(rise(replicas)[1], abs=0.15)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quickstart_solves_its_task(tmp_path, seed):
    run = Run("--config", "quickstart", "--seed", str(seed), folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    assert run.json("summary.json")["eval/exact_match"] >= 0.95


@pytest.mark.long
@pytest.mark.parametrize("staleness", ["0", "4"])
def test_a_cut_distribution_is_learned_from(tmp_path, staleness):
    """Off policy too, ratios are between distributions over the same ids."""
    cut = ("--config", "quickstart", "--rollout.top_p", "0.9", "--rollout.max_staleness", staleness)
    run = Run(*cut, folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    rows = run.metrics()
    if staleness == "0":
        assert max(row["logprob/error_max"] for row in rows) <= 1e-4
        assert max(abs(row["ratio/max"] - 1) for row in rows) <= 1e-4
    assert max(row["ratio/max"] for row in rows) < 1e3
    assert run.json("summary.json")["eval/exact_match"] > 0.9
