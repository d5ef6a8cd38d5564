"""The benchmark of SFT and DPO against TRL, as far as it goes without TRL."""

import json

import pytest

from rl.cli.arguments import parse_config
from rl.trainers.preference import PreferenceTrainer
from rl.trainers.sft import SFTTrainer
from tests.kit.scripts import module_fixture

SCRIPT = "scripts/bench/sft_against_trl.py"
STEPS = 4


bench = module_fixture(SCRIPT)


@pytest.fixture
def work(bench, tmp_path):
    bench.write_work(tmp_path / "work", STEPS)
    return tmp_path / "work"


def rows_in_order(work, name):
    return [json.loads(line) for line in (work / f"{name}_in_order.jsonl").read_text().splitlines()]


def test_both_sides_train_on_the_same_batches(bench, work):
    def trainer_of(kind, name, work):
        arguments = ["--config", f"sft_ours.{name}_words", "--model.hf_path", str(work / "model")]
        arguments += ["--task.path", str(work / f"{name}.jsonl"), "--steps", str(STEPS)]
        return kind(parse_config(arguments, program="test")[1])

    def texts(tokenizer, examples, *, trained):
        return [
            tokenizer.decode([int(t) for t in each.tokens[each.trained == trained]])
            for each in examples
        ]

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    trainer = trainer_of(SFTTrainer, "sft", work)
    rows = rows_in_order(work, "sft")
    assert len(rows) == STEPS * bench.EXAMPLES
    for step in range(STEPS):
        trainer.step = step
        examples = trainer.next_examples()
        theirs = rows[step * bench.EXAMPLES :][: bench.EXAMPLES]
        assert texts(tokenizer, examples, trained=False) == [row["prompt"] for row in theirs]
        assert texts(tokenizer, examples, trained=True) == [
            f"{row['completion'].strip()} <eos>" for row in theirs
        ]
    trainer = trainer_of(PreferenceTrainer, "dpo", work)
    theirs = rows_in_order(work, "dpo")[: bench.PAIRS]
    for side in ("chosen", "rejected"):
        answers = [getattr(pair, side) for pair in trainer.next_examples()]
        assert texts(tokenizer, answers, trained=True) == [
            f"{row[side].strip()} <eos>" for row in theirs
        ]


@pytest.mark.long
@pytest.mark.parametrize("name", ["sft", "sft_packed", "dpo", "dpo_packed"])
def test_our_side_runs_and_yields_seconds_and_tokens_of_each_step(bench, work, tmp_path, name):
    ran = bench.run_ours(bench.SIDES[name], STEPS, work, tmp_path / "run")
    assert len(ran["seconds"]) == len(ran["tokens"]) == STEPS
    assert min(ran["seconds"]) > 0
    rows = rows_in_order(work, bench.SIDES[name].trainer)
    words = sum(len(text.split()) for row in rows for text in row.values())
    if name.startswith("sft"):
        assert sum(ran["tokens"]) == pytest.approx(words + len(rows))  # a stop token in each
    else:
        prompts = sum(len(row["prompt"].split()) for row in rows)
        assert sum(ran["tokens"]) == pytest.approx(words + prompts + 2 * len(rows))


def test_ratios_are_those_of_each_round_and_the_short_key_has_the_smaller(bench):
    result = bench.result_of(
        {
            "trl_sft": [10.0, 20.0, 10.0],
            "sft": [20.0, 20.0, 30.0],
            "trl_sft_packed": [10.0, 10.0, 10.0],
            "sft_packed": [15.0, 15.0, 15.0],
            "trl_dpo": [10.0, 10.0, 10.0],
            "dpo": [13.0, 13.0, 13.0],
            "dpo_packed": [12.0, 12.0, 12.0],
        }
    )
    assert result["trl_over_ours_sft"] == 2.0
    assert result["trl_over_ours"] == result["trl_over_ours_sft_packed"] == 1.5
    assert result["trl_over_ours_dpo"] == result["trl_over_ours_dpo_packed"] == 1.2
    assert result["spread"]["sft"] == [1.0, 3.0]
    assert result["tokens_per_s"]["sft"] == 20.0


def test_sides_whose_losses_differ_did_not_do_the_same_work(bench):
    bench.check_losses({"trl_sft": 6.0, "sft": 6.0005, "sft_packed": 6.0})
    with pytest.raises(SystemExit, match="loss of sft_packed is 6.010000, that of trl_sft 6.00"):
        bench.check_losses({"trl_sft": 6.0, "sft": 6.0, "sft_packed": 6.01})
