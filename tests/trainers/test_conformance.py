"""Promises of every trainer: RL, supervised, preference, reward model, and one of the user's own.

The tests of a kind share one trainer of real engines, in the order of this file. The kinds that
are long train from datasets as the preference trainer does.
"""

import gzip
import json

import pytest
import torch
from safetensors.torch import load_file

from rl.errors import Interrupted, RunError
from rl.trainers.trainer import TrainerState
from tests.kit.chats import tiny_chat_model
from tests.kit.tables import cases
from tests.trainers.kinds import (
    CONFIGS,
    Run,
    config_of,
    descendants,
    have_ended,
    random_outputs,
    set_evaluations,
    temporary_files,
    write_custom_trainer,
)
from tests.warm import rank_variables

MEMBERS = (
    "train evaluate save_pretrained configure_model configure_dataloaders configure_functions "
    "arguments dataset_train dataset_eval model state dtype param_dtype optimizer scheduler"
)
STEPS = 4
HALF = TrainerState(step=2, version=2)
OFTEN = ("rl", "preference")
KINDS = cases(CONFIGS, OFTEN)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a tiny Qwen3 with Qwen3's chat template; the custom trainer is on the path."""
    folder = tmp_path_factory.mktemp("model")
    write_custom_trainer(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield tiny_chat_model(folder)


@pytest.fixture(scope="module", params=KINDS)
def run(request, model, tmp_path_factory):
    """A trainer that has trained for four steps, without evaluations on the way."""
    config = config_of(request.param, model, tmp_path_factory.mktemp("run") / "run", STEPS)
    config.trainer.checkpoint.keep_latest_k = 3
    config.export_every = 2
    config.profile.steps = (2, 3)
    config.profile.ranks = ("trainer[0]",) + ("generator-0[0]",) * (request.param == "rl")
    rank_variables()  # the server of the ranks stays
    before = descendants()
    run = Run(request.param, config)
    run.trained = run.do(run.trainer.train)
    run.whole = run.numbers()
    run.processes = descendants() - before
    yield run
    run.close()


def test_a_trainer_has_the_members_of_the_protocol_and_configures_itself_in_order(run):
    assert [name for name in MEMBERS.split() if getattr(run.trainer, name, None) is None] == []
    assert run.called == ["model", "dataloaders", "functions"]


def test_the_state_is_that_of_the_last_step_and_the_newest_checkpoints_are_kept(run):
    assert (run.trained.step, run.trained.version, len(run.whole)) == (STEPS, STEPS, STEPS)
    assert any(name.startswith("eval/") for name in run.trained.metrics)
    assert run.trainer.run.checkpoints.complete() == [2, 3, 4]


def test_chosen_ranks_are_profiled_in_chosen_steps_with_their_memory(run):
    folder = run.trainer.run.record.folder / "profiles"
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-3"]
    works = {"trainer[0]": "Optimizer.step", "generator-0[0]": "aten::"}
    for rank in run.trainer.arguments.profile.ranks:
        paths = [folder / step / f"{rank}.json.gz" for step in ("step-2", "step-3")]
        traces = [gzip.decompress(path.read_bytes()) for path in paths]
        names = {event["name"] for each in traces for event in json.loads(each)["traceEvents"]}
        assert "[memory]" in names and any(each.startswith(works[rank]) for each in names), rank
    assert len([*folder.glob("*/*")]) == 2 * len(run.trainer.arguments.profile.ranks)


def test_the_model_is_exported_every_so_many_steps(run, tmp_path):
    folder = run.trainer.run.record.folder
    assert [path.name for path in (folder / "exports").iterdir()] == ["step-2"]
    run.do(lambda: run.trainer.save_pretrained(tmp_path, HALF))
    weights, expected, last = (
        load_file(path / "model.safetensors")
        for path in (folder / "exports" / "step-2", tmp_path, folder / "export")
    )
    assert weights.keys() == expected.keys() == last.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert not all(torch.equal(weights[name], last[name]) for name in weights)


def test_an_evaluation_is_repeatable_and_changes_no_weight(run):
    scores = run.do(run.trainer.evaluate)
    assert scores == run.do(run.trainer.evaluate)
    assert scores == {name: run.summary()[name] for name in scores}
    assert scores != run.do(lambda: run.trainer.evaluate(HALF))
    assert run.digest() == run.summary()["policy_digest"]
    assert run.trainer.state.version == STEPS


def test_the_saved_model_is_read_by_transformers(run, tmp_path):
    run.do(lambda: run.trainer.save_pretrained(tmp_path))
    ours, theirs = random_outputs(run, tmp_path)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


def test_going_back_takes_the_same_steps_again_also_with_evaluations(run):
    whole = run.summary()["policy_digest"]
    set_evaluations(run.trainer.arguments, every=1)
    assert run.do(lambda: run.trainer.train(HALF)).step == STEPS
    assert run.numbers() == run.whole
    assert run.digest() == run.summary()["policy_digest"] == whole
    written = {row["step"]: row for row in run.trainer.run.record.read_evaluations()}
    scores = run.do(lambda: run.trainer.evaluate(TrainerState(step=3, version=3)))
    assert scores == {name: written[3][name] for name in scores}
    set_evaluations(run.trainer.arguments, every=0)


def test_a_gradient_that_is_not_finite_ends_the_run_as_configured(run):
    run.is_cracked = True
    run.trainer.arguments.watchdog.non_finite = "fail"
    with pytest.raises(RunError, match="step 3: non_finite: .*trainer/grad_norm is "):
        run.do(lambda: run.trainer.train(HALF))
    run.trainer.arguments.watchdog.non_finite = "warn"
    assert run.do(lambda: run.trainer.train(HALF)).step == STEPS
    rows = run.numbers()
    assert [row["trainer/skipped_steps"] for row in rows] == [0, 0, 1, 2]
    assert rows[:2] == run.whole[:2]
    assert run.trainer.state.version == HALF.version
    run.is_cracked = False


def test_closing_twice_leaves_nothing_behind(run):
    files = temporary_files(run.processes)
    run.close()
    run.close()
    assert run.processes and have_ended(run.processes, 60)
    assert [path for path in files if path.exists()] == []
    names = {path.name for path in run.trainer.run.record.folder.iterdir()}
    assert not {name for name in names if name.startswith(".") or "tmp" in name}


@pytest.mark.long
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_run_in_two_parts_equals_one_in_a_single_part(kind, model, tmp_path):
    whole = Run(kind, config_of(kind, model, tmp_path / "whole", 10))
    assert whole.do(whole.trainer.train).step == 10
    whole.close()
    config = config_of(kind, model, tmp_path / "parts", 10)
    first = Run(kind, config)
    first.leaves_after = 5
    with pytest.raises(Interrupted, match="after step 5"):
        first.do(first.trainer.train)
    first.close()
    config.resume = True
    second = Run(kind, config)
    assert second.do(second.trainer.train).step == 10
    second.close()
    assert second.numbers() == whole.numbers()
    assert second.summary()["policy_digest"] == whole.summary()["policy_digest"]
