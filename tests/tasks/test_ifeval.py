"""Instructions of IFEval: which answers follow which, and how a task scores them."""

import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from rl.errors import ConfigError
from rl.metrics import Metrics
from rl.tasks.ifeval import IFEval
from rl.tasks.instructions import RULES, follows, loosened
from rl.types import Completion
from tests.kit.tables import check_rows

LESS, LEAST = "less than", "at least"
CASES = {
    "keywords:existence": ({"keywords": ["rain", "sun"]}, "Sunny, then RAIN", "rain"),
    "keywords:frequency": (
        {"keyword": " rain ", "frequency": 2, "relation": LEAST},
        "rain, Rains",
        "rain",
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["rain"]}, "rains", "Rain."),
    "keywords:letter_frequency": (
        {"letter": "#", "let_frequency": 2, "let_relation": LESS},
        "one #",
        "# #",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb ***", "a *** *** b"),
    "length_constraints:number_words": ({"num_words": 3, "relation": LESS}, "it-is", "It is so."),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Rain"},
        "a\n\n'rain, b",
        "rain\n\nb",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] [b c]", "[a\nb] [c]"),
    "detectable_content:postscript": ({"postscript_marker": "P.P.S"}, "x\nP. P.S: y", "P.S. y"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n - b", "* a\n** b"),
    "detectable_format:constrained_response": ({}, "So: My answer is no.", "My answer is: no."),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        "*a* **b** * *",
        "*a* ** **",
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Part ", "num_sections": 2},
        "Part 1 a Part2 b",
        "Part 1 a Part b",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<a>> b", "<< >> b"),
    "combination:two_responses": ({}, "a\n******\nb", "a ****** a"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it. "}, " say it. No.", "No. Say it."),
    "startend:end_checker": ({"end_phrase": " The End."}, '"... the end."', "The end"),
    "punctuation:no_comma": ({}, "a; b", "a, b"),
    "startend:quotation": ({}, ' "a" ', '"a'),
}
PACKAGES = {
    "language:response_language": ({"language": "de"}, "deutsch", "english"),
    "change_case:english_capital": ({}, "ENGLISH", "English"),
    "change_case:english_lowercase": ({}, "english", "deutsch"),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": LEAST},
        "One. Two.",
        "One",
    ),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": LEAST},
        "A B",
        "A b",
    ),
}


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins of langdetect and nltk; tests/lm_eval has the real ones."""
    langdetect, nltk = ModuleType("langdetect"), ModuleType("nltk")
    langdetect.DetectorFactory = type("DetectorFactory", (), {"seed": None})
    langdetect.LangDetectException = LookupError
    langdetect.detect = lambda text: {"deutsch": "de", "english": "en"}[text.lower()]
    nltk.sent_tokenize = lambda text: text.split(". ")
    nltk.word_tokenize = str.split
    for package in (langdetect, nltk):
        monkeypatch.setitem(sys.modules, package.__name__, package)


def test_each_instruction_has_answers_that_follow_it_and_answers_that_do_not(packages):
    def check(name):
        options, right, wrong = (CASES | PACKAGES)[name]
        assert follows(right, name, options)
        assert not follows(wrong, name, options)
        assert not follows(" \n", name, options)

    check_rows(RULES, check)
    assert follows("12.", "language:response_language", {"language": "de"})  # no language at all


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        ("detectable_content:number_placeholders", "["),
        ("detectable_format:number_bullet_lists", "\n"),
        ("detectable_format:title", "<"),
    ],
)
def test_rules_read_a_megabyte_of_one_character(instruction, text):
    """A pattern whose time grows with the square of the length would take an hour."""
    assert not follows(text * 2**20 + "x", instruction, CASES[instruction][0])


def test_a_variant_without_first_and_last_line_and_asterisks_follows_loosely():
    assert loosened("*a*\nb\nc") == [
        "*a*\nb\nc",
        "a\nb\nc",
        "b\nc",
        "b\nc",
        "*a*\nb",
        "a\nb",
        "b",
        "b",
    ]


def build(model, path, *rows, **config):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"path": str(path), "held_out_fraction": 1.0} | config
    return IFEval.Config(**config).build(seed=0, model=model)


def row(number, *instructions):
    names, options = zip(*instructions, strict=True)
    return {
        "key": number,
        "prompt": f"Do {number}.",
        "instruction_id_list": names,
        "kwargs": options,
    }


def test_scores_are_those_of_prompts_and_of_instructions(model, tmp_path):
    no_comma, quoted = ("punctuation:no_comma", {}), ("startend:quotation", {"language": None})
    short = ("length_constraints:number_words", {"num_words": 3, "relation": LESS})
    task = build(
        model, tmp_path / "a.jsonl", row(1, no_comma, quoted), row(2, no_comma, quoted, short)
    )
    first, second = task.eval_prompts(9)
    assert "user\nDo 1.<|im_end|>" in first.text
    silent = Completion.written([])
    both = task.score(first, '<think>a, b</think>\n"a"', silent)
    loose = task.score(second, 'Sure,\n"a, b"', silent)
    assert (both.reward, both.correct, loose.reward, loose.correct) == (1.0, True, 0.0, False)
    one = task.score(second, "Sure:\n*a*", silent)
    assert (one.reward, one.correct, one.metrics["loose"]) == (2 / 3, False, 0.0)
    merged = Metrics.merged(Metrics(each.metrics) for each in (both, loose))
    assert {**merged} == {"instructions": 2 / 5, "instructions_loose": 4 / 5, "loose": 0.5}


def test_thoughts_are_no_part_of_the_answer(model, tmp_path):
    first = (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "hello"},
    )
    task = build(model, tmp_path / "a.jsonl", row(1, first), row(2, ("punctuation:no_comma", {})))
    paragraphs, no_comma = task.eval_prompts(2)
    body = "Hello there.\n\nSecond paragraph."
    opened = replace(no_comma, text=f"{no_comma.text}<think>\n")
    silent = Completion.written([])

    def correct(prompt, text):
        return task.score(prompt, text, silent).correct

    assert correct(paragraphs, body)
    assert correct(paragraphs, f"<think>\nHm.\n</think>\n\n{body}")
    assert correct(paragraphs, f"<seed:think>Hm.</seed:think>\n\n{body}")
    assert correct(opened, "Hm, so</think>Yes.")
    for cut in ("<think>\nThe user wants none", "<think>a</think><think>b", "<think></think>\n"):
        assert not correct(no_comma, cut)
    assert not correct(opened, "The user wants none")


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (("punctuation:no_coma", {}), "no instruction 'punctuation:no_coma'.*did you mean"),
        (("startend:end_checker", {}), "the options {} of startend:end_checker: .*end_phrase"),
        (("punctuation:no_comma", {"num_words": 3}), "the options .*num_words"),
        (("keywords:existence", {"keywords": ["("]}), r"the options .*\(.* of keywords:existence"),
        (
            ("length_constraints:number_words", {"num_words": 3, "relation": "about"}),
            "the relation is 'about'",
        ),
        (("change_case:english_lowercase", {}), "cannot be checked: .*langdetect.*tiller-rl.bench"),
    ],
)
def test_a_row_whose_instructions_cannot_be_checked_is_refused(
    model, tmp_path, monkeypatch, instruction, message
):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ConfigError, match=f"line 2: .*{message}"):
        build(
            model, tmp_path / "bad.jsonl", row(1, ("punctuation:no_comma", {})), row(2, instruction)
        )
    with pytest.raises(ConfigError, match="line 1: 'instruction_id_list' is None"):
        build(model, tmp_path / "none.jsonl", {"prompt": "Do."})
