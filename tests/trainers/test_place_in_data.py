"""A run on given examples goes on with the next example, whatever changed meanwhile."""

import asyncio
import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rl.algorithms.sequence_losses import KTOLoss
from rl.data.stored import Stored
from rl.errors import RunError
from rl.trainers.dataset import DatasetTrainer
from rl.trainers.preference import PreferenceTrainer
from rl.trainers.sft import SFTTrainer
from tests.kit.chats import chat_rows, labelled_rows, preference_rows

KINDS = {
    "sft": (SFTTrainer, "sft_jsonl", chat_rows(23), {}),
    "dpo": (PreferenceTrainer, "dpo_jsonl", preference_rows(23), {}),
    "kto": (PreferenceTrainer, "dpo_jsonl", labelled_rows(12), {"loss": KTOLoss.Config()}),
}


@pytest.fixture(params=KINDS)
def make(request, examples_config):
    """Function that makes a trainer without held-out examples; fields are those of the config."""
    kind, name, rows, own = KINDS[request.param]

    def make(change=lambda rows: rows, **fields):
        fields = {"task.held_out_fraction": 0.0} | own | fields
        return kind(examples_config(name, **fields), change(rows))

    return make


def after(trainer, steps: int):
    """Return the examples of ``steps`` steps and the state of the checkpoint after them."""
    examples = []
    for _ in range(steps):
        examples += trainer.next_examples()
        trainer.step += 1
    state = asyncio.run(trainer.snapshot()) | {"step": trainer.step}
    keys = [b"".join(each.tokens.tobytes() for each in item.examples) for item in examples]
    return keys, json.loads(json.dumps(state))


def resumed(trainer, state):
    """Return the trainer as it goes on from ``state``."""
    asyncio.run(DatasetTrainer.restore(trainer, state))
    trainer.step = state["step"]
    return trainer


def test_another_number_of_examples_per_step_skips_and_repeats_none(make):
    whole, _ = after(make(examples_per_step=2), len(make().dataset_train))
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


def test_other_weights_are_other_data(examples_config):
    digests = set()
    for weight in (1, 0.5, 1):
        rows = chat_rows(9)
        rows[3]["messages"][1]["weight"] = weight
        digests.add(SFTTrainer(examples_config("sft_jsonl"), rows).data_digest)
    assert len(digests) == 2


@pytest.mark.parametrize("make", ["sft"], indirect=True)
def test_epochs_do_not_set_the_length_of_a_run_whose_steps_have_two_sizes(make):
    _, state = after(make(examples_per_step=4, epochs=2), 3)
    assert resumed(make(examples_per_step=4, epochs=2), state).total_steps == 12
    said = "examples_per_step is 5, .* 12 examples in 3 steps, .* steps to 10"
    with pytest.raises(RunError, match=said):
        resumed(make(examples_per_step=5, epochs=2), state)


ROWS = {"sft": chat_rows, "dpo": preference_rows}


@pytest.mark.parametrize("kind", ROWS)
def test_a_table_gives_the_examples_of_lines_in_their_order(
    kind, examples_config, tmp_path, dataset_cache
):
    rows = ROWS[kind](23)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    trainer_class, name, *_ = KINDS[kind]

    def make(ending):
        return trainer_class(examples_config(name, **{"task.path": str(tmp_path / ending)}))

    lines, table = make("rows.jsonl"), make("rows.parquet")
    assert isinstance(table.dataset_train, Stored) and isinstance(table.dataset_eval, Stored)
    assert [*map(table.key, table.dataset_eval)] == [*map(lines.key, lines.dataset_eval)] != []
    assert after(table, 12) == after(lines, 12)
    left, state = after(make("rows.jsonl"), 5)
    assert (
        left + after(resumed(make("rows.parquet"), state), 7)[0] == after(make("rows.jsonl"), 12)[0]
    )


def test_a_run_on_a_dataset_of_the_hub_is_resumed_with_its_commit(
    examples_config, hub, variable, tmp_path
):
    name = "tiller/chats"

    def make(**fields):
        trainer = SFTTrainer(examples_config("sft_jsonl", **{"task.path": name} | fields))
        trainer.run.claim().release()
        return trainer.arguments.task.revision, trainer.data_digest

    def files(count):
        return {"train.jsonl": "\n".join(map(json.dumps, chat_rows(count))).encode()}

    older = hub.add(f"datasets/{name}", files(23))
    first = make()
    assert first[0] == older
    newer = hub.repositories[f"datasets/{name}"].commit(files(24))
    assert make(resume=True) == first
    variable("HF_HUB_OFFLINE", "1")
    assert make(resume=True) == first
    variable("HF_HUB_OFFLINE", "0")
    assert make(resume=True, **{"task.revision": newer})[0] == newer
    last = make(output_dir=str(tmp_path / "another"))
    assert last[0] == newer and last[1] != first[1]
