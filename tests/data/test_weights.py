"""Weights of messages and rows are factors of the loss. Other keys of a loss are refused."""

import pytest

from rl.data.batches import batch_of
from rl.errors import ConfigError
from tests.data.test_conversations import CHAT, read
from tests.kit.conversations import said, user


def weighted(**keys):
    """A conversation of two answers, the first of them with ``keys``."""
    return [user("a"), said("bad") | keys, user("c"), said("good")]


@pytest.mark.parametrize(
    ("keys", "weight"),
    [
        ({"weight": 0}, 0),
        ({"weight": 0.5}, 0.5),
        ({"weight": 2}, 2),
        ({"weight": None}, 1),
        ({"train": False}, 0),
        ({"trainable": True}, 1),
        ({"loss_mask": 0}, 0),
        ({"loss_mask": 1, "weight": 0.25}, 0.25),
        ({"loss": False}, 0),
        ({"constraints": [1], "train_source": "web"}, 1),
        (dict.fromkeys(("glossary_id", "molecular_weight", "weight_kg", "unmasked"), 3), 1),
        (dict.fromkeys(("val_loss", "train_loss", "loss_ratio", "mask_ratio"), 0.5), 1),
        ({"trained_on": True, "is_train": False, "num_train_examples": 0, "train_ids": [1]}, 1),
    ],
)
@pytest.mark.parametrize("turns", ["together", "apart"])
@pytest.mark.parametrize("of_row", [1, 0.5])
def test_weights_of_messages_and_rows_are_factors_of_the_loss(dialect, keys, weight, turns, of_row):
    row = {"messages": weighted(**keys), "weight": of_row}
    factors = {}
    for example in read([row], dialect, turns=turns):
        batch = batch_of([example])
        for part in ("bad", "good"):
            token = dialect.encode(part)[0]
            places = (batch.tokens == token) & batch.loss_mask
            if places.any():
                factors[part] = batch.loss_weights[places].unique().tolist()
    wanted = {"bad": [weight * of_row], "good": [of_row]}
    assert factors == {part: each for part, each in wanted.items() if each != [0]}


def test_weights_act_on_all_roles_if_every_token_is_trained(dialect):
    row = {"messages": [user("x") | {"weight": 0}, said("b"), user("c") | {"train": True}]}
    (example,) = read([row], dialect, loss_on="all")
    whole = read([{"messages": [user("x"), said("b"), user("c")]}], dialect, loss_on="all")[0]
    first = len(dialect.render([user("x")]).tokens)
    assert not example.trained[:first].any()
    assert example.trained[first:].tolist() == whole.trained[first:].tolist()


def test_rows_of_the_weight_0_are_left_out(dialect):
    rows = [{"messages": CHAT, "weight": each} for each in (1, 0)]
    assert [example.line for example in read(rows, dialect)] == [0]
    with pytest.raises(ConfigError, match="data.path: each row has the weight 0"):
        read(rows[1:], dialect)


def test_columns_of_metadata_with_the_name_of_a_loss_can_be_left_out(dialect):
    metadata = {"loss": 1.7, "weights": [1, 2], "mask": [0, 1], "train": [{"x": 1}]}
    for name, value in metadata.items():
        row = {"messages": CHAT, name: value}
        with pytest.raises(ConfigError, match=f"metadata: --data.columns {name} ''"):
            read([row], dialect)
        (example,) = read([row], dialect, columns={name: ""})
        assert example.weights is None


WEIGHTS = {
    "negative": ({"messages": weighted(weight=-1)}, "message 1: 'weight' is -1; write a number of"),
    "not finite": ({"messages": weighted(weight=float("nan"))}, "message 1: 'weight' is nan"),
    "of no number": ({"messages": CHAT, "weight": [1]}, r"'weight' is \[1\]; write a number"),
    "half a switch": ({"messages": weighted(train=0.5)}, "message 1: 'train' is 0.5; write tr"),
    "unknown": (
        {"messages": weighted(loss_weight=2)},
        "message 1: 'loss_weight' is 2; write 'weight' .* or 'train' .* in place of 'loss_weight'",
    ),
    "details": ({"messages": weighted(train_detail=[{}])}, "message 1: 'train_detail' is"),
    "splits": ({"train": [{"messages": CHAT}]}, "'train' is .*, or the rows of one split as lines"),
    "camel case": ({"messages": weighted(lossMask=0)}, "message 1: 'lossMask' is 0"),
    "of tokens": ({"messages": CHAT, "completion_mask": [0, 1]}, "'completion_mask' is"),
    "of a user": (
        {"messages": [user("a") | {"train": True}, said("b")]},
        "message 0: 'train' is True, but only the assistant's messages are trained",
    ),
    "all of a row": (
        {"messages": [user("a"), said("b") | {"weight": 0}]},
        "nothing in it is to be",
    ),
    "bad answer": (
        {"prompt": [user("a")], "completion": "b", "label": False},
        "field 'label' is False: it calls the answer bad",
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_keys_that_would_change_the_loss_are_honoured_or_refused(dialect, name):
    row, message = WEIGHTS[name]
    with pytest.raises(ConfigError, match=f"^data.path: row 0: .*{message}"):
        read([row], dialect)
