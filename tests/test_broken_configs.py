"""Broken configs, tasks and files end with a sentence that names file and line, and exit code 2."""

import importlib
import json
import sys

import pytest

from rl.cli.arguments import find_config, load_config, parse_config, shipped_configs
from rl.cli.training_run import run
from rl.config.frozen import frozen
from rl.errors import ConfigError
from rl.train import main

PROGRAM = "python -m rl.train"
HEAD = """\
from dataclasses import dataclass
from rl.config import RLConfig
from rl.tasks.copy_digits import CopyDigits
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a user's module of a fresh name; returns a function of its source."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"broken_{tmp_path.name}".replace("-", "_")

    def write(source: str, head: str = HEAD) -> str:
        (tmp_path / f"{name}.py").write_text(head + source)
        return name

    yield write
    sys.modules.pop(name, None)


def error_of(config: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(config)
    return str(error.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def mine( -> RLConfig:\n", "line 4: SyntaxError: invalid syntax; correct it there"),
        ("x = 1 / 0\n", "line 4, in <module>: ZeroDivisionError: division by zero; correct it"),
        ("import no_such_package\n", "line 4, in <module>: ModuleNotFoundError: No module named"),
        ("raise SystemExit(3)\n", "line 4, in <module>: SystemExit: 3; correct it there"),
        (
            "def mine() -> RLConfig:\n    return RLConfig(dta=3)\n",
            "line 5, in mine: TypeError: RLConfig has no attribute 'dta'; did you mean",
        ),
        (
            "def mine() -> RLConfig:\n    import json\n    return json.loads('{')\n",
            "line 6, in mine: JSONDecodeError: Expecting property name",
        ),
        (
            "from torchtitan.components.checkpoint import CheckpointManager\n"
            "def mine() -> RLConfig:\n    return CheckpointManager.Config(keep_latest_k=1)\n",
            "line 6, in mine: ValueError: We need to maintain at least 2",
        ),
        ("def mine(size: int) -> RLConfig:\n    pass\n", "TypeError: mine() missing 1 required"),
    ],
)
def test_an_exception_in_a_config_module_names_the_users_line(module, tmp_path, source, said):
    name = module(source)
    text = error_of(f"{name}.mine")
    assert text.startswith(f"--config {name}.mine: ")
    assert said in text
    if "missing 1 required" not in said:
        assert str(tmp_path) in text


@pytest.mark.parametrize("returned", ["None", "3", "CopyDigits.Config()"])
@pytest.mark.parametrize("annotation", ["RLConfig", "'c.RLConfig'"])
def test_a_function_that_returns_no_run_config_is_named(module, returned, annotation):
    """Its annotation may name the module of the config."""
    name = module(f"import rl.config as c\ndef mine() -> {annotation}:\n    return {returned}\n")
    text = error_of(f"{name}.mine")
    assert text.startswith(f"--config {name}.mine: mine in ")
    assert f"returned {returned[:9]}" in text
    assert text.endswith("it must return a config such as RLConfig")


def test_a_config_of_wrong_types_is_refused_by_field(module):
    made = "RLConfig(task=CopyDigits.Config(), rollout=None)"
    name = module(f"def mine() -> RLConfig:\n    return {made}\n")
    with pytest.raises(ConfigError, match="rollout is None; it must be a RolloutConfig"):
        parse_config(["--config", f"{name}.mine"], program=PROGRAM)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not JSON: Expecting value: line 1 column 1"),
        ('{"name": "x", "config": {', "is not JSON: Expecting property name"),
        ("[" * 100_000, "is not JSON: "),
        ("[]", "holds []; it must be the config.json of a run"),
        ('{"config": {}}', "it has no 'name'; it must be the config.json of a run"),
        ('{"name": "x"}', "it has no 'config'; it must be the config.json of a run"),
        ('{"name": "x", "config": []}', "it has no 'config'"),
        ('{"name": "x", "config": {}}', "config has no type, which names the kind of config"),
    ],
)
def test_a_config_json_that_is_broken_is_named(tmp_path, content, said):
    path = tmp_path / "config.json"
    path.write_text(content)
    text = error_of(str(path))
    assert text.startswith(f"--config {path}: ")
    assert said in text


def test_a_config_json_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    assert "there is no such file" in error_of(str(tmp_path / "none.json"))
    assert "cannot be read: Is a directory" in error_of(str(tmp_path / "folder.json"))
    assert "is not JSON: 'utf-8' codec can't decode" in error_of(str(tmp_path / "bytes.json"))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("rollout", 5, "config.rollout is 5; it must be an object with the fields of RolloutConf"),
        ("task", {"digits": 3}, "config.task"),
    ],
)
def test_a_config_json_with_a_wrong_value_names_the_field(tmp_path, field, value, said):
    path = tmp_path / "config.json"
    config = frozen(find_config("quickstart")()) | {field: value}
    path.write_text(json.dumps({"name": "x", "config": config}))
    with pytest.raises(ConfigError) as error:
        parse_config(["--config", str(path)], program=PROGRAM)
    assert said in str(error.value)


MINE = """
from dataclasses import replace
from rl.algorithms.losses import ClippedLoss
from rl.cli.arguments import find_config
from rl import Score

class Mine(CopyDigits):
    @dataclass(kw_only=True, slots=True)
    class Config(CopyDigits.Config):
        {field}
    {method}

def mine() -> RLConfig:
    config = find_config("quickstart")()
    config.deadlines.reward = 2.0
    return replace(config, task=Mine.Config())
"""
READS_WORDS = """\
def __init__(self, config, *, seed, model):
        super().__init__(config, seed=seed, model=model)
        self.words = open("/no/such/words.txt").read()"""
PICKY = """\
unit: str = "m"
        def __post_init__(self):
            {"m": 1.0}[self.unit]"""
LOSS = """
class Loss(ClippedLoss):
    @dataclass(kw_only=True, slots=True)
    class Config(ClippedLoss.Config):
        pass
    def __init__(self, config):
        super().__init__(config)
        self.table = {}["missing"]

def lossy() -> RLConfig:
    config = find_config("quickstart")()
    config.algorithm.loss = Loss.Config()
    return config
"""


def users(field: str = "pass", method: str = "pass") -> str:
    """Return the source of a task and a config of a user."""
    return MINE.format(field=field, method=method)


@pytest.mark.parametrize(
    ("source", "function", "said"),
    [
        (
            users(method=READS_WORDS),
            "mine",
            "task: building Mine: .*, line 16, in __init__: FileNotFoundError: .*words",
        ),
        (users() + LOSS, "lossy", "algorithm: .*, in __init__: KeyError: 'missing'"),
    ],
)
def test_an_exception_in_a_users_constructor_names_the_line_before_anything_starts(
    module, tmp_path, source, function, said
):
    name = module(source)
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=said):
        run(["--config", f"{name}.{function}", "--output-dir", str(folder)], program=PROGRAM)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ("return Score(reward=1, correct=True, metrics={'mean': 1})", "a metric named 'mean'"),
        ("return Score(reward=1, correct=True, metrics={'a': 'b'})", "a='b', which is not a"),
        ("return prompt.answr", "raised AttributeError: 'Prompt' object has no"),
        ("import time; time.sleep(3600)", "did not end in 2 s"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_before_anything_starts(
    module, tmp_path, score, said
):
    name = module(users(method=f"def score(self, prompt, text, completion): {score}"))
    folder = tmp_path / "run"
    with pytest.raises(ConfigError) as error:
        run(["--config", f"{name}.mine", "--output-dir", str(folder)], program=PROGRAM)
    assert str(error.value).startswith("task: the reward of Mine ")
    assert said in str(error.value)
    assert str(error.value).endswith("the reference answer of the first prompt; correct score")
    assert not folder.exists()


def test_an_exception_in_a_users_config_class_names_the_line(module):
    name = module(users(field=PICKY))
    said = "line 15, in __post_init__: KeyError: 'mile'; correct it"
    with pytest.raises(ConfigError, match=said):
        parse_config(["--config", f"{name}.mine", "--task.unit", "mile"], program=PROGRAM)


def test_the_program_ends_with_2_and_one_line(module, capsys):
    name = module("x = 1 / 0\n")
    assert main(["--config", f"{name}.mine"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --config {name}.mine: ")
    assert len(said.splitlines()) == 1


def test_configs_of_tiller_are_found_beside_a_package_of_the_same_name(tmp_path, monkeypatch):
    package = tmp_path / "configs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text("raise RuntimeError('not one of Tiller')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "configs"]:
        monkeypatch.delitem(sys.modules, name)
    shipped_configs.cache_clear()
    assert {"quickstart", "gsm8k_jsonl", "qwen3_8b"} <= shipped_configs().keys()
    assert importlib.import_module("configs").__file__ == str(package / "__init__.py")
    sys.modules.pop("configs")
