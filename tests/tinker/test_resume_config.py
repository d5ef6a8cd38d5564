"""A resumed server has the model that its clients know."""

import json

import pytest

from rl.config.frozen import frozen
from rl.errors import ConfigError
from rl.serve import changes_of
from tests.tinker.clients import config_of

REFUSED = {
    "seed: 0 → 1": ("seed", 1),
    "model.revision: None → main": ("model.revision", "main"),
    "model.hf_path: None → other": ("model.hf_path", "other"),
    "model.dim: 64 → 32": ("model.dim", 32),
    "trainer.lora.rank: 32 → 8": ("trainer.lora.rank", 8),
    "trainer.lora.alpha: ": ("trainer.lora.alpha", 8.0),
    "stand_ins: False → True": ("stand_ins", True),
    "generator.dtype: float32": ("generator.dtype", "bfloat16"),
}
NOTED = {
    "names: ": ("names", ("new/name",)),
    "state_every: 20 → 5": ("state_every", 5),
    "max_loras: 4 → 0": ("max_loras", 0),
    "max_restarts: 3 → 9": ("max_restarts", 9),
    "model.max_seq_len: 128 → 256": ("model.max_seq_len", 256),
}


def changed(field, value):
    config = config_of()
    *path, name = field.split(".")
    part = config
    for each in path:
        part = getattr(part, each)
    setattr(part, name, value)
    return config


@pytest.fixture
def folder(tmp_path):
    content = {"name": "serve_tiny", "config": frozen(config_of())}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize("text", REFUSED)
def test_a_server_does_not_resume_with_another_model(folder, text):
    with pytest.raises(ConfigError) as error:
        changes_of(changed(*REFUSED[text]), folder)
    assert text in str(error.value) and "another --output-dir" in str(error.value)


@pytest.mark.parametrize("text", NOTED)
def test_a_resumed_server_says_what_else_has_changed(folder, text):
    (change,) = changes_of(changed(*NOTED[text]), folder)
    assert text in change


def test_a_model_is_the_same_under_another_spelling_of_its_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "model").mkdir()
    content = {"name": "serve_tiny", "config": frozen(changed("model.hf_path", "model"))}
    (folder / "config.json").write_text(json.dumps(content))
    assert changes_of(changed("model.hf_path", str(folder / "model")), folder) == []
