"""Best checkpoints of a run, and the early end of a run without better ones."""

import json
import math

import pytest

from rl.config import BestConfig
from rl.errors import ConfigError, RunError
from rl.observe.checkpoint_folders import StepFolders
from rl.trainers.best import Best
from rl.trainers.evaluation import Evaluation
from rl.trainers.sft import SFTTrainer
from tests.kit.chats import chat_rows
from tests.trainers.loops import evaluating, results

VALUES = [0.9, 0.1, 0.5, 0.3, 0.5, 0.2, 0.1, 0.1, 0.4, 0.6, 0.7, 0.8, 0.9]
"""Scores of the weights after each step."""


@pytest.fixture
def best(run, monkeypatch):
    """Run the loop with an evaluation of VALUES after each step."""

    async def scores(self, metric_calculator=None):
        (generator,) = run.generators
        version = generator.version
        versions = {"eval/version_min": version, "eval/version_max": version}
        return {"eval/exact_match": VALUES[version], **versions}

    def start(metric="eval/exact_match", keep=2, **options):
        def prepare(trainer, *_):
            trainer.keep = keep

        fields = {f"best.{name}": value for name, value in options.pop("best", {}).items()}
        fields |= evaluating(1) | {"best.metric": metric}
        run(prepare, save_every=options.pop("save_every", 1), fields=fields, **options)
        return run

    monkeypatch.setattr(Evaluation, "scores", scores)
    return start


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_best_checkpoints_stay_beside_the_newest(best, staleness):
    run = best(steps=7, staleness=staleness, best={"keep": 2})
    folders = StepFolders(run.record.checkpoints)
    assert folders.complete() == [2, 4, 6, 7]
    assert folders.best() == {2: 0.5, 4: 0.5}
    assert [*folders.best()] == [2, 4]
    assert (run.summary["best_step"], run.summary["best_value"]) == (2, 0.5)


def test_each_evaluated_step_is_saved_whatever_the_interval(best):
    run = best(steps=5, save_every=100)
    assert StepFolders(run.record.checkpoints).complete() == [2, 4, 5]


@pytest.mark.parametrize(("staleness", "resumed"), [(0, 3), (0, 5), (2, 4), (2, 6)])
def test_evaluations_without_a_better_one_end_the_run_also_after_a_resume(best, staleness, resumed):
    fields = {"patience": 2, "min_delta": 0.1}
    options = {"steps": 12, "staleness": staleness, "best": fields, "keep": 0}
    run = best(**options)
    assert run.summary["steps"] == 4 + staleness + 1
    assert [row["step"] for row in run.record.read_evaluations()] == [*range(1, 5 + staleness)]
    whole = results(run.record)
    last = run.summary
    run = best(saved={resumed: run.saved[resumed]}, **options)
    assert results(run.record) == whole
    assert run.summary["best_step"] == last["best_step"] == 2


def test_a_run_with_patience_goes_on_while_values_get_better(best):
    assert best(steps=12, best={"patience": 7}).summary["steps"] == 12


@pytest.mark.parametrize(
    ("fields", "values", "step"),
    [
        ({"patience": 2}, [0.1, 0.5, 0.5, 0.5], 3),
        ({"patience": 2}, [0.1, 0.5, 0.4, 0.6, 0.1], None),
        ({"patience": 2, "min_delta": 0.2}, [0.1, 0.2, 0.3], 2),
        ({"patience": 1, "mode": "min"}, [0.5, 0.4, 0.3, 0.4, 0.1], 3),
        ({"patience": 1}, [0.5, math.nan], 1),
        ({}, [0.5] * 9, None),
    ],
)
def test_patience_counts_evaluations_that_are_not_better(fields, values, step, tmp_path):
    best = Best(BestConfig(metric="eval/x", **fields), [StepFolders(tmp_path)])
    rows = [{"step": number, "eval/x": value} for number, value in enumerate(values)]
    assert best.stale_since(rows) == step


def test_a_metric_that_no_evaluation_has_ends_the_run_by_name(best):
    said = "best.metric is 'eval/exact'; the evaluations have eval/exact_match, eval/skipped, eval"
    with pytest.raises(RunError, match=said):
        best("eval/exact", steps=2)


REFUSED = {
    "best.keep": (2, "best.keep is 2; it must be 1 unless best.metric is set"),
    "rollout.pipeline": ("asynchronous", "best.metric is 'eval/x'; it must be empty unless rollou"),
    "trainer.checkpoint.enable": (False, "best.metric is 'eval/x'; it must be empty unless train"),
    "best.min_delta": (0.1, "best.min_delta is 0.1; it must be 0 unless best.patience is above 0"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_act_is_refused(run, field):
    value, message = REFUSED[field]
    metric = {} if field == "best.keep" else {"best.metric": "eval/x"}
    with pytest.raises(ConfigError) as error:
        run.make(save_every=1, fields=metric | {field: value})
    assert str(error.value).startswith(message)


def test_supervised_training_ends_early_and_keeps_its_best_step(examples_config):
    """The learning rate is 0, so no step is better than the first."""
    fields = {"metric": "eval/loss", "mode": "min", "patience": 1}
    config = examples_config(
        "sft_jsonl",
        validate_every=1,
        **{f"best.{name}": value for name, value in fields.items()},
        **{"trainer.checkpoint.interval": 100},
    )
    config.trainer.optimizer.param_groups[0].optimizer_kwargs["lr"] = 0.0
    with SFTTrainer(config, chat_rows(40)) as trainer, pytest.raises(RunError, match="none of 2 s"):
        trainer.train()
    folders = StepFolders(trainer.run.record.checkpoints)
    assert folders.complete() == [1, 2] and [*folders.best()] == [1]
    summary = json.loads((trainer.run.record.folder / "summary.json").read_text())
    assert summary["best_step"] == 1
