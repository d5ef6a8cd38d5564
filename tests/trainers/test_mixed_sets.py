"""Sets of a supervised run are drawn in proportion to their weights, in an order that resumes."""

import json
from collections import Counter

import pytest

from rl.data.batches import batch_of
from rl.data.order import epoch_index
from rl.errors import ConfigError
from rl.trainers.sft import SFTTrainer
from rl.training.packing import MicroBatchLimits, plan
from tests.kit.chats import chat_rows
from tests.trainers.test_place_in_data import after, resumed


@pytest.fixture
def make(examples_config, tmp_path, monkeypatch):
    """Function that makes a trainer on three sets of 3, 20 and 4 examples."""
    monkeypatch.chdir(tmp_path)
    rows = chat_rows(27)
    for name, part in (
        ("none", [row | {"weight": 0} for row in rows]),
        ("a", rows[:3]),
        ("b", rows[3:23]),
        ("c-1", rows[23:25]),
        ("c-2", rows[25:]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))

    def make(weights, **fields):
        own = {"task.path": "a.jsonl,b.jsonl,c-*.jsonl", "task.held_out_fraction": 0.0}
        config = examples_config("sft_jsonl", **own | fields)
        config.task.weights = weights
        return SFTTrainer(config)

    return make


def test_sets_have_the_shares_of_their_weights(make):
    trainer = make({"a.jsonl": 1, "c-*.jsonl": 2})
    drawn = []
    for step in range(12):
        trainer.step = step
        drawn += trainer.next_examples()
    parts = [each.part for each in drawn]
    assert Counter(parts) == {0: 16, 2: 32}
    assert all(Counter(parts[at : at + 3]) == {0: 1, 2: 2} for at in range(0, 48, 3))
    first = [[*trainer.dataset_train].index(each) for each in drawn if each.part == 0]
    assert first == [epoch_index(trainer.arguments.seed, number, 3) for number in range(16)]
    last = [[*trainer.dataset_train].index(each) - 23 for each in drawn if each.part == 2]
    assert Counter(last) == dict.fromkeys(range(4), 8)


def test_without_weights_each_epoch_has_each_example_once(make):
    keys, _ = after(make({}, examples_per_step=27), 1)
    assert len({*keys}) == 27


def test_a_resumed_run_goes_on_with_the_next_example(make):
    weights = {"a.jsonl": 1, "b.jsonl": 3}
    whole, _ = after(make(weights, examples_per_step=2), 20)
    first, state = after(make(weights, examples_per_step=4), 4)
    second, _ = after(resumed(make(weights, examples_per_step=3), state), 8)
    assert first + second == whole


def test_a_row_of_a_micro_batch_holds_examples_of_several_sets(make):
    trainer = make({"a.jsonl": 1, "b.jsonl": 1})
    examples = trainer.next_examples()
    assert {each.part for each in examples} == {0, 1}
    trainer.arguments.trainer.micro_batch_tokens = 4096
    limits = MicroBatchLimits.of(trainer.arguments.trainer, "varlen")
    assert len(plan(batch_of(examples), limits)) == 1


@pytest.mark.parametrize(
    ("weights", "fields", "said"),
    [
        ({"d.jsonl": 1}, {}, "task.weights is 'd.jsonl'; it must be one of 'a.jsonl', 'b.jsonl'"),
        ({"a.jsonl": 0}, {}, "task.weights: each weight is 0"),
        ({"a.jsonl": 1}, {"task.path": "a.jsonl"}, "task.weights: task.path names no sets"),
        (
            {"none.jsonl": 1},
            {"task.path": "none.jsonl,b.jsonl"},
            "task.weights: 'none.jsonl' has no example to train on",
        ),
    ],
)
def test_sets_that_cannot_be_drawn_from_are_refused(make, weights, fields, said):
    with pytest.raises(ConfigError, match=said):
        make(weights, **fields)
