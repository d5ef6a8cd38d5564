"""An error of a config is data, which is rendered in one place."""

import pickle

import pytest

from rl.algorithms.sequence_losses import DPOLoss
from rl.errors import ConfigError

DATA = {"field": "loss.beta", "value": 0, "allowed": "above 0", "fix": "raise it"}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError(**DATA), "loss.beta is 0; it must be above 0: raise it"),
        (
            ConfigError(**DATA).inside("evaluation"),
            "evaluation: loss.beta is 0; it must be above 0: raise it",
        ),
        (
            ConfigError(field="loss", value=DPOLoss.Config, allowed="of values"),
            "loss is DPOLoss.Config; it must be of values",
        ),
        (ConfigError("no tokenizer; save it").inside("task"), "task: no tokenizer; save it"),
    ],
)
def test_an_error_has_the_text_of_its_data_in_every_process(error, text):
    copy = pickle.loads(pickle.dumps(error))
    assert str(error) == str(copy) == text
    assert (copy.field, copy.value, copy.fix) == (error.field, error.value, error.fix)
