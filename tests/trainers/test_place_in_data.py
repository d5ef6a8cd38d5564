"""A run on given examples goes on with the next example, whatever changed meanwhile."""

import asyncio
import json

import pytest

from rl.algorithms.sequence_losses import KTOLoss
from rl.errors import RunError
from rl.trainers.dataset import DatasetTrainer
from rl.trainers.preference import PreferenceTrainer
from rl.trainers.sft import SFTTrainer
from tests.trainers.tiny_chat import chat_rows, labelled_rows, preference_rows

KINDS = {
    "sft_jsonl": (SFTTrainer, chat_rows(23)),
    "dpo_jsonl": (PreferenceTrainer, preference_rows(23)),
    "kto": (PreferenceTrainer, labelled_rows(12)),
}


@pytest.fixture(params=KINDS)
def make(request, make_preference):
    """Makes a trainer without held-out examples; fields are those of the config."""
    kind, rows = KINDS[request.param]

    def trainer_of(change=lambda rows: rows, **fields):
        kto = request.param == "kto"
        config = make_preference("dpo_jsonl" if kto else request.param, **fields)
        config.task.held_out_fraction = 0.0
        if kto:
            config.loss = KTOLoss.Config()
        return kind(config, change(rows))

    return trainer_of


def after(trainer, steps: int):
    """Examples of ``steps`` steps and the state of the checkpoint after them."""
    examples = []
    for _ in range(steps):
        examples += trainer.next_examples()
        trainer.step += 1
    state = asyncio.run(trainer.snapshot()) | {"step": trainer.step}
    return keys(trainer, examples), json.loads(json.dumps(state))


def keys(trainer, items):
    return [b"".join(each.tokens.tobytes() for each in item.examples) for item in items]


def resumed(trainer, state):
    """The trainer as it goes on from ``state``."""
    asyncio.run(DatasetTrainer.restore(trainer, state))
    trainer.step = state["step"]
    trainer.require_same_data()
    return trainer


def test_another_number_of_examples_per_step_skips_and_repeats_none(make):
    size = len(make().dataset_train)
    whole, _ = after(make(examples_per_step=2), size)
    first, state = after(make(examples_per_step=4), 2)
    second, again = after(resumed(make(examples_per_step=3), state), 3)
    third, _ = after(resumed(make(examples_per_step=5), again), 1)
    assert [*first, *second, *third] == whole[:22]
    assert again["examples_seen"] == 17


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda rows: [*rows, rows[0]], id="one more"),
        pytest.param(lambda rows: rows[:-1], id="one less"),
        pytest.param(lambda rows: [rows[1], rows[0], *rows[2:]], id="another order"),
    ],
)
def test_other_data_are_refused(make, change):
    _, state = after(make(), 2)
    assert resumed(make(), state)
    with pytest.raises(RunError, match="^task: the examples differ from those that the run has"):
        resumed(make(change), state)


def test_other_weights_are_other_data(make_preference):
    digests = set()
    for weight in (1, 0.5, 1):
        rows = chat_rows(9)
        rows[3]["messages"][1]["weight"] = weight
        digests.add(SFTTrainer(make_preference("sft_jsonl"), rows).data_digest)
    assert len(digests) == 2


def test_epochs_do_not_set_the_length_of_a_run_whose_steps_have_two_sizes(make_preference):
    rows = chat_rows(23)

    def trainer_of(size):
        config = make_preference("sft_jsonl", examples_per_step=size, epochs=2)
        config.task.held_out_fraction = 0.0
        return SFTTrainer(config, rows)

    _, state = after(trainer_of(4), 3)
    assert resumed(trainer_of(4), state).total_steps == 12
    with pytest.raises(
        RunError, match="examples_per_step is 5, .* 12 examples in 3 steps, .* steps to 10"
    ):
        resumed(trainer_of(5), state)
