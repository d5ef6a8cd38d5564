"""scripts/real_model.py: published models from the package index, and word problems."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.generation.generator_config import GeneratorConfig
from tests.generation.test_families import worst_error
from tests.kit.generator_ranks import GeneratorRanks
from tests.kit.model_folders import open_folder, transformers_logits
from tests.kit.policies import TIED_SPLIT
from tests.kit.runs import Run, words
from tests.kit.scenes import logits_of
from tests.kit.scripts import module, module_fixture
from tests.kit.tokenizers import make_model

script = module_fixture("scripts/real_model.py")


def test_word_problems_are_distinct_right_and_the_same_on_every_machine(script, tmp_path):
    script.write_problems(tmp_path)
    train, held, solved, pairs = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held", "solved", "pairs")
    )
    rows = train + held
    questions = [row["question"] for row in rows]
    assert len({*questions}) == len(rows) == 3_200
    assert questions[0] == (
        "Max has 18 apples, finds 34 more and then loses 9. How many apples does Max have?"
    )
    assert rows[0]["answer"] == "18 + 34 = 52, 52 - 9 = 43 #### 43"
    for row in rows:
        for calculation in row["answer"].partition(" ####")[0].split(", "):
            left, right = calculation.split(" = ")
            assert eval(left) == int(right)
        assert row["answer"].endswith(f" #### {right}")
    for name, plain in (("train", train), ("held", held)):
        lines = (tmp_path / f"{name}_one_shot.jsonl").read_text().splitlines()
        for row, line in zip(plain, lines, strict=True):
            shown, solution, asked = json.loads(line).pop("question")
            assert {**row, "question": [shown, solution, asked]} == json.loads(line)
            assert asked == {"role": "user", "content": row["question"]}
    assert shown["content"] not in questions
    *work, last = solution["content"].split("\n")
    for calculation in work:
        left, right = calculation.split(" = ")
        assert eval(left) == int(right)
    assert last == f"#### {right}"
    messages = [row["messages"] for row in solved]
    asked = {user["content"].partition("\n")[0] for user, _ in messages}
    assert len(asked - {*questions}) == len(messages) == 3200
    assert all("####" in assistant["content"] for _, assistant in messages)
    assert len({*asked, *(row["prompt"][0]["content"].partition("\n")[0] for row in pairs)}) == 3600
    for row in pairs:
        (right,), (wrong,) = (
            [message["content"].rpartition("#### ") for message in row[side]]
            for side in ("chosen", "rejected")
        )
        assert right[0] == wrong[0]
        assert int(right[2]) == int(right[0].rpartition("= ")[2]) != int(wrong[2])


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_file_that_is_not_the_published_one_is_refused(script, tmp_path, monkeypatch, name):
    packages = tmp_path / "lib"
    model = script.MODELS[name]
    for part in model.parts:
        file = packages / part
        file.parent.mkdir(parents=True)
        file.write_bytes(b"GGUF, cut off")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {packages}\n")
    python.chmod(0o755)
    monkeypatch.setattr(script, "environment_python", lambda *_, **__: python)
    with pytest.raises(SystemExit, match=rf"the SHA-256 \w{{64}}; published is {model.sha256}"):
        script.from_package(model, tmp_path / "model", Path("environment"))
    assert not (tmp_path / "model").exists()


@pytest.mark.long
@pytest.mark.download
def test_the_published_model_answers_a_question(script, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "smollm2"
    script.main([str(folder), "--package"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])


@pytest.mark.long
@pytest.mark.download
def test_both_sides_compute_the_other_published_model_as_transformers_does(script, tmp_path):
    folder = tmp_path / "gemma3"
    script.main([str(folder), "--model", "gemma3", "--package"])
    text = [2, 818, 5279, 529, 7001, 563]  # <bos>The capital of France is
    tokens = torch.tensor([text * 4])
    wanted = transformers_logits(folder, tokens)
    engine, checkpointer = open_folder(folder, tmp_path, max_seq_len=256)
    checkpointer.close()
    trained = logits_of(engine, tokens).log_softmax(-1)
    assert (trained - wanted.log_softmax(-1)).abs().max() <= 1e-4
    del engine, trained, wanted
    ranks = GeneratorRanks(GeneratorConfig(kv_cache_gib=0.1), TIED_SPLIT)
    try:
        assert worst_error(ranks, folder, fuse_qkv=True) <= 1e-4
    finally:
        ranks.close()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f"{json.dumps({'text': f'{n} plus {n} is {2 * n}.'})}\n" for n in range(40))
    )
    run = Run(
        *words("--config sft_jsonl --steps 1 --examples_per_step 4 --validate_every 0"),
        *words("--model.max_seq_len 64 --task.max_tokens 64 --task.loss_on all"),
        *words("--trainer.micro_batch_tokens 64"),
        *("--model.hf_path", str(folder), "--task.path", str(rows)),
        folder=tmp_path / "run",
    )
    assert run.wait() == 0, run.stderr
    assert 0 < run.metrics()[0]["loss/mean"] < 8


@pytest.mark.long
@pytest.mark.download
def test_both_sides_of_a_published_model_compute_the_same_bits(script, tmp_path):
    folder = tmp_path / "smollm2"
    script.main([str(folder), "--package", "--problems", str(tmp_path)])
    run = Run(
        *words("--config smollm2 --steps 2 --parity bitwise --watchdog.parity fail"),
        *words("--rollout.prompts_per_step 4 --rollout.max_resampled_groups 0"),
        *words("--algorithm.prompts_per_minibatch 0"),
        *("--model.hf_path", str(folder), "--task.path", str(tmp_path / "train_one_shot.jsonl")),
        *words("--evaluation.prompts 0"),
        folder=tmp_path / "run",
    )
    assert run.wait() == 0, run.stderr
    names = ("logprob/error_max", "logprob/differing_tokens", "ratio/max")
    assert [[row[name] for name in names] for row in run.metrics()] == [[0.0, 0.0, 1.0]] * 2


def test_roundings_keep_an_update_in_expectation_except_for_nearest(tmp_path, monkeypatch, capsys):
    folder = make_model(tmp_path)
    script = module("scripts/rounding.py", monkeypatch)
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    start = {name: each.float() for name, each in found.state_dict().items() if each.ndim == 2}
    trained = {name: each * (1 + 1e-3) for name, each in start.items()}
    shares = {}
    for rounding, weights in script.roundings(start, trained).items():
        pairs = [(trained[name] - each, weights[name] - each) for name, each in start.items()]
        whole, kept = (
            torch.cat([each.flatten() for each in one]) for one in zip(*pairs, strict=True)
        )
        shares[rounding] = float(kept @ whole / whole.square().sum())
    assert shares.pop("dither") == pytest.approx(1.0, abs=0.02)
    assert shares.pop("stochastic") == pytest.approx(1.0, abs=0.02)
    assert shares == {"start": 0.0, "nearest": 0.0}
    messages = [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": "7"}]
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": messages}) + "\n")
    monkeypatch.setattr("sys.argv", ["rounding.py", str(folder), str(folder), str(data)])
    script.main()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    rows = [json.loads(line) for line in printed]
    assert [row["rounding"] for row in rows] == ["start", "nearest", "dither", "stochastic"]
    assert rows[0]["kl"] == rows[0]["error"] == 0.0
