"""Pairs of answers and labelled answers: only the answers are trained."""

import numpy as np
import pytest

from rl.data.examples import EncodingConfig
from rl.data.preferences import read_labelled, read_preferences
from rl.errors import ConfigError
from tests.kit.conversations import ASKED, EMPTY, HEAD, TOOL, call, said, tool, user
from tests.kit.tokenizers import painted, qwen3


def pairs(rows, dialect, **fields):
    return read_preferences(rows, dialect, EncodingConfig(**({"max_tokens": 10**6} | fields)))


def labelled(rows, dialect, **fields):
    return read_labelled(rows, dialect, EncodingConfig(**({"max_tokens": 10**6} | fields)))


def texts(pair):
    return [painted(qwen3(), e.tokens, e.trained) for e in (pair.chosen, pair.rejected)]


def test_pairs_of_text(dialect):
    (pair,) = pairs([{"prompt": "a? ", "chosen": "yes", "rejected": "no"}], dialect)
    assert texts(pair) == ["a? «yes<|im_end|>»", "a? «no<|im_end|>»"]
    assert qwen3().decode(pair.chosen.tokens[: pair.prompt_tokens]) == "a? "
    assert pair.chosen.line == pair.rejected.line == 0


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": [said("yes")], "rejected": [said("no")]},
        {"prompt": ASKED, "chosen": "yes", "rejected": "no"},
        {"chosen": [*ASKED, said("yes")], "rejected": [*ASKED, said("no")]},
        {"prompt": "c", "chosen": [*ASKED, said("yes")], "rejected": [*ASKED, said("no")]},
        {"prompt": None, "chosen": [*ASKED, said("yes")], "rejected": [*ASKED, said("no")]},
    ],
)
def test_the_prompt_of_messages_is_given_or_what_both_begin_with(dialect, row):
    (pair,) = pairs([row], dialect)
    assert texts(pair) == [f"{HEAD}«{EMPTY}yes<|im_end|>»", f"{HEAD}«{EMPTY}no<|im_end|>»"]
    for example in (pair.chosen, pair.rejected):
        assert qwen3().decode(example.tokens[: pair.prompt_tokens]) == HEAD
    (off,) = pairs([row], dialect, enable_thinking=False)
    assert texts(off)[1] == f"{HEAD}{EMPTY}«no<|im_end|>»"


def test_pairs_part_within_a_tool_cycle(dialect):
    begin = [user("a"), said("", call({"a": 1})), tool("3")]
    row = {"chosen": [*begin, said("3")], "rejected": [*begin, said("4")], "tools": [TOOL]}
    (pair,) = pairs([row], dialect)
    assert pair.chosen.tokens[: pair.prompt_tokens].tolist() == (
        pair.rejected.tokens[: pair.prompt_tokens].tolist()
    )
    assert texts(pair)[0].endswith(
        f"</tool_response><|im_end|>\n<|im_start|>assistant\n«{EMPTY}3<|im_end|>»"
    )
    assert texts(pair)[0].count("«") == 1


def test_a_pair_may_have_a_margin(dialect):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = [row | {"margin": each} for each in (0.5, None, 2)]
    assert [pair.margin for pair in pairs(rows, dialect)] == [0.5, None, 2.0]
    for wrong in ("1", True, float("nan")):
        with pytest.raises(ConfigError, match="row 0: field 'margin' is .*; write a number"):
            pairs([row | {"margin": wrong}], dialect)


def test_messages_of_the_weight_0_are_no_part_of_a_score(dialect):
    chosen = [said("", call({"a": 1})), tool("3"), said("3") | {"weight": 0}]
    row = {"prompt": [user("a")], "chosen": chosen, "rejected": [said("4") | {"train": True}]}
    (pair,) = pairs([row], dialect)
    assert texts(pair)[0].endswith("</tool_call><|im_end|>»")


def test_a_pair_is_dropped_if_one_of_it_is_too_long(dialect):
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c " * 50},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    kept = pairs(rows, dialect, max_tokens=20, truncate="drop")
    assert (len(kept), kept.dropped, kept.truncated) == (1, 1, 0)
    assert kept[0].chosen.line == 1
    cut = pairs(rows, dialect, max_tokens=20, truncate="right")
    assert (len(cut), cut.dropped, cut.truncated) == (2, 0, 1)
    assert [len(pair.rejected) for pair in cut] == [20, 3]
    with pytest.raises(ConfigError, match="row 0: it has .* tokens, more than data.max_tokens=20"):
        pairs(rows, dialect, max_tokens=20)


def test_a_pair_that_a_cut_makes_equal_is_dropped_and_counted(dialect):
    same = "b " * 50
    rows = [
        {"prompt": "a", "chosen": f"{same}good", "rejected": f"{same}bad"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    kept = pairs(rows, dialect, max_tokens=20, truncate="right")
    assert (len(kept), kept.dropped, kept.truncated) == (1, 1, 0)
    assert len(pairs(rows, dialect, max_tokens=200)) == 2


def both(chosen, rejected, **fields):
    return {"chosen": chosen, "rejected": rejected, **fields}


A, B, C, THOUGHTFUL = user("a"), said("b"), said("c"), said("b", thought="t")
BROKEN = {
    "chosen missing": ({"prompt": "a", "rejected": "b"}, "field 'chosen' is missing; write"),
    "rejected missing": ({"prompt": "a", "chosen": "b"}, "field 'rejected' is missing; write"),
    "equal": (both("b", "b", prompt="a"), "'chosen' and 'rejected' are equal"),
    "texts without a prompt": (both("a", "b"), "'chosen' is 'a', without a 'pro"),
    "prompt of text before conversations": (
        both([A, B], [A, C], prompt="x"),
        "field 'prompt' is 'x' and field 'chosen' .*; without 'prompt' if 'chosen' holds it too",
    ),
    "prompt repeated": (
        both([*ASKED, B], [*ASKED, C], prompt=ASKED),
        "field 'chosen' is .* of which the first is the assistant's",
    ),
    "one begins the other": (both([*ASKED, B], ASKED), r"field 'rejected' is \[\]; write"),
    "other questions": (
        both([A, B], [user("c"), B]),
        "field 'chosen' is .* of which the first is the assistant's",
    ),
    "one continues the other": (
        both([A, THOUGHTFUL, C], [A, THOUGHTFUL, C, user("d"), said("e")]),
        r"field 'chosen' is \[\]",
    ),
    "thinking of the prompt left out of one": (
        both(
            [C], [C, user("d"), said("e")], prompt=[A, said("", call({}), thought="t"), tool("3")]
        ),
        "the chat template writes the prompt otherwise before 'chosen' than before 'rejected'",
    ),
    "one thinks though thinking is off": (
        both([THOUGHTFUL], "c", prompt=ASKED, off=True),
        "writes the prompt otherwise .* let both have thinking or none",
    ),
    "weighted": (
        both([B], "c", prompt=ASKED, weight=0.5),
        "a loss of preferences has no weights of rows",
    ),
    "weighted message": (
        both([B | {"weight": 0.5}], "c", prompt=ASKED),
        "a loss of preferences has no weights of rows, and those of messages are 0 or 1",
    ),
    "not rendered": (both([said(None)], "b", prompt=ASKED), "message 4: conte"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_pairs_that_cannot_be_trained_are_refused_by_number_and_cause(dialect, name):
    row, message = BROKEN[name]
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ConfigError, match=f"^data.path: row 1: .*{message}"):
        pairs([good, row], dialect, enable_thinking=not row.get("off"))


def test_labelled_answers(dialect):
    rows = [
        {"prompt": "a? ", "completion": "yes", "label": True},
        {"prompt": [user("a")], "completion": [said("no")], "label": False},
    ]
    good, bad = labelled(rows, dialect)
    assert (good.label, bad.label) == (True, False)
    shown = [painted(qwen3(), e.example.tokens, e.example.trained) for e in (good, bad)]
    assert shown[0] == "a? «yes<|im_end|>»"
    assert shown[1].endswith(f"<|im_start|>assistant\n«{EMPTY}no<|im_end|>»\n")
    assert good.example.trained.dtype == np.bool_
    kept = labelled(
        [rows[0] | {"completion": "b " * 50}, rows[0]], dialect, max_tokens=20, truncate="drop"
    )
    assert (len(kept), kept.dropped) == (1, 1)


@pytest.mark.parametrize("label", [None, 1, "true", 0.0])
def test_labels_are_true_or_false(dialect, label):
    row = {"prompt": "a", "completion": "b", "label": label}
    with pytest.raises(ConfigError, match="row 0: field 'label' is .*; write true or false"):
        labelled([row], dialect)
    with pytest.raises(ConfigError, match="row 0: field 'completion' is missing; write"):
        labelled([{"prompt": "a", "label": True}], dialect)
