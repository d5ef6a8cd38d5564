"""Multiple-choice questions: which forms are read, and which letter is the answer."""

import json

import pytest

from rl.errors import ConfigError
from rl.tasks.multiple_choice import MultipleChoice, chosen_letter
from rl.types import Completion
from tests.kit.tables import check_rows

SILENT = Completion.written([])
WORDS = ["red", "green", "blue", "none"]
GPQA = {
    "Question": "Which colour? \n",
    "Correct Answer": "green\n",
    **{f"Incorrect Answer {n}": word for n, word in enumerate(("red", "blue", "none"), 1)},
    "Subdomain": "Optics",
}
ROWS = {
    "MMLU": {"question": "Which colour?", "choices": WORDS, "answer": 1, "subject": "art"},
    "MMLU-Pro": {"question": "Which colour?", "options": WORDS, "answer": "B", "answer_index": 1},
    "GPQA": GPQA,
    "other columns": {"ask": "Which colour?", "choices": WORDS, "gold": 1},
}


def build(model, path, *rows, **config):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"path": str(path), "held_out_fraction": 1.0} | config
    return MultipleChoice.Config(**config).build(seed=0, model=model)


def test_published_forms_are_read(model, tmp_path):
    def check(name):
        columns = {"question": "ask", "answer": "gold"} if name == "other columns" else {}
        task = build(model, tmp_path / f"{len(name)}.jsonl", ROWS[name], columns=columns)
        (prompt,) = task.eval_prompts(2)
        lines = [f"{letter}) {word}" for letter, word in zip("ABCD", WORDS, strict=True)]
        if name == "GPQA":
            lines = [line for line in prompt.text.splitlines() if line[1:3] == ") "]
            assert sorted(line[3:] for line in lines) == sorted(WORDS)
        asked = "\n".join(["user\nWhich colour?\n", *lines, "", "Think step by step, then end"])
        assert asked in prompt.text
        assert f"{prompt.answer}) green" in lines
        said = task.score(prompt, f"I see.\n\nAnswer: {prompt.answer}", SILENT)
        assert (said.reward, said.correct, said.metrics) == (1.0, True, {"answered": 1.0})
        other = chr(ord(prompt.answer) ^ 3)
        assert not task.score(prompt, f"Answer: {prompt.answer}\nAnswer: {other}", SILENT).correct
        assert task.score(prompt, "green", SILENT).metrics == {"answered": 0.0}

    check_rows(ROWS, check)


def test_choices_of_gpqa_are_in_an_order_of_the_question_alone(model, tmp_path):
    rows = [GPQA | {"Question": f"Which colour, {number}?"} for number in range(40)]
    task = build(model, tmp_path / "many.jsonl", *rows, instruction="Say which.")
    prompts = task.eval_prompts(40)
    assert {prompt.answer for prompt in prompts} == {*"ABCD"}
    assert "\nSay which.<|im_end|>" in prompts[0].text
    again = build(model, tmp_path / "more.jsonl", *reversed(rows), instruction="Say which.")
    assert [(p.text, p.answer) for p in again.eval_prompts(40)[::-1]] == [
        (p.text, p.answer) for p in prompts
    ]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: C", "C"),
        ("**Answer:** (C).", "C"),
        ("answer: **C**\nAs I said.", "C"),
        (r"Answer: $\boxed{\text{C}}$", "C"),
        (r"so $\boxed{C}$", "C"),
        ("Answer: A, no.\nAnswer: C) blue", "C"),
        ("(C)", "C"),
        ("C.\n", "C"),
        (r"\boxed{\textbf{C}}", "C"),
        (r"so $\boxed{\mathbf{C}}$", "C"),
        (r"Answer: $\mathbf{(C)}$", "C"),
        (r"Answer: \(C\)", "C"),
        (r"\boxed{\,\boldsymbol{C}\,}", "C"),
        (r"\boxed{\mbox{C}}", "C"),
        (r"\boxed{\bf C}", "C"),
        ("Answer: “C”", "C"),
        ("Answer：C", "C"),
        ("Answer: A & B", None),
        ("Answer: A B", None),
        ("Answer: (A) and (B)", None),
        ("Answer: **A**, **B**", None),
        ("Answer: A, I guess", "A"),
        ("Answer: C, A colour", "C"),
        ("Answer: C\nA is wrong", "C"),
        ("Answer: `C`", "C"),
        ("`C`", "C"),
        ("The answer is: C", "C"),
        ("Answer: C green", "C"),
        ("Answer: I", "I"),
        ("Answer: A is right", "A"),
        ("Answer: I believe it is red", None),
        ("Answer: I'm not sure", None),
        ("Answer: A colour", None),
        (r"\boxed{C, D}", None),
        (r"\boxed{C \text{ or } D}", None),
        ("Answer: Cats", None),
        ("The answer is red", None),
        ("C or D", None),
        ("", None),
    ],
)
def test_the_last_marked_letter_counts(text, letter):
    assert chosen_letter(text) == letter


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": None}, "field 'choices' is None; write a list of texts"),
        ({"answer": 4}, "field 'answer' is 4; write the place or letter of a choice"),
        ({"answer": "green"}, "field 'answer' is 'green'; write"),
        ({"answer": True}, "field 'answer' is True; write"),
        ({"question": " "}, "field 'question' is missing or not text"),
    ],
)
def test_a_row_without_question_choices_or_answer_is_refused(model, tmp_path, change, message):
    with pytest.raises(ConfigError, match=f"task.path: .* line 1: {message}"):
        build(model, tmp_path / "bad.jsonl", ROWS["MMLU"] | change)
