"""A field's old name is refused by its new one: on the command line, in code and in a file."""

import json

import pytest

from configs.quickstart import quickstart
from rl.cli import load_config, parse_config
from rl.errors import ConfigError
from rl.frozen import frozen
from rl.renamed import RENAMED


def field(config, name):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def test_every_new_name_is_a_field_and_no_old_one_is():
    for old, new in RENAMED.items():
        field(quickstart(), new)
        with pytest.raises(AttributeError):
            field(quickstart(), old)


@pytest.mark.parametrize(
    ("old", "new"), [*RENAMED.items(), ("data.path", "task.path")], ids=lambda name: name
)
def test_the_command_line_refuses_an_old_name_by_the_new(old, new):
    with pytest.raises(ConfigError, match=f"^--{old}: this field is now called --{new}$"):
        parse_config(["--config", "quickstart", f"--{old}", "1"], program="test")


@pytest.mark.parametrize(("old", "new"), RENAMED.items(), ids=lambda name: name)
def test_a_config_file_refuses_an_old_name_by_the_new(tmp_path, old, new):
    section, _, name = old.rpartition(".")
    content = frozen(quickstart())
    (content[section] if section else content)[name] = None
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"name": "old", "config": content}))
    with pytest.raises(ConfigError, match=f"{old.split('.')[-1]} is now called {new}"):
        load_config(str(path))


@pytest.mark.parametrize(
    "body",
    ["RLConfig(data=None)", "setattr(quickstart().rollout, 'parts_per_step', 2)"],
    ids=["argument", "attribute"],
)
def test_an_old_name_in_a_config_function_is_refused_with_the_new_name(tmp_path, monkeypatch, body):
    monkeypatch.syspath_prepend(tmp_path)
    module = f"mine_{abs(hash(body))}"
    lines = "from configs.quickstart import quickstart\nfrom rl.config import RLConfig\n"
    (tmp_path / f"{module}.py").write_text(f"{lines}def mine() -> RLConfig:\n    return {body}\n")
    new = "task" if "data" in body else "rollout.stream_chunks"
    with pytest.raises(ConfigError, match=f"; it is now called {new}; correct it there"):
        load_config(f"{module}.mine")
