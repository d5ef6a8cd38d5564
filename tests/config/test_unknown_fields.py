"""A config refuses every attribute that is not a field of it, with the nearest field."""

import copy
import dataclasses
import importlib
import pickle
import pkgutil
from functools import cached_property

import pytest
from torchtitan.config import Configurable

import rl
from rl.cli.arguments import find_config, load_config, parse_config, shipped_configs
from rl.config import RolloutConfig, RunConfig
from rl.errors import ConfigError
from rl.tasks.chat import ChatJsonl
from rl.validation import validate
from rl.validation.values import values
from tests.kit.tables import check_rows

ROOMS = ("algorithms", "config", "data", "environments", "model", "observe", "session", "tasks")
ENGINES = ("rl.generation.generator_config", "rl.training.trainer_config", "rl.weights.transport")


@dataclasses.dataclass
class Part:
    """Part of a user, who forgets ``slots``."""

    size: int = 1


class Mine(ChatJsonl):
    """Task of a user, who inherits a class with a ``__dict__``."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ChatJsonl.Config):
        part: Part = dataclasses.field(default_factory=Part)

        @cached_property
        def halves(self) -> int:
            return self.part.size // 2


def subclasses(kind):
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_part_of_every_shipped_config_refuses_an_unknown_attribute():
    def sections(config):
        return [each.content for each in values(config) if dataclasses.is_dataclass(each.content)]

    def check(name: str) -> None:
        for part in sections(shipped_configs()[name]()):
            with pytest.raises(AttributeError, match=r"has no attribute 'unknown_one'; "):
                part.unknown_one = 1

    check_rows(shipped_configs(), check)


def test_every_config_class_refuses_an_unknown_attribute():
    def config_classes() -> set[type]:
        """Return every config class that a module of ``rl`` defines."""
        for room in ROOMS:
            package = importlib.import_module(f"rl.{room}")
            for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
                importlib.import_module(module.name)
        for module in ENGINES:
            importlib.import_module(module)
        found = {*subclasses(Configurable.Config), *subclasses(RunConfig)}
        return {kind for kind in found if kind.__module__.startswith("rl.")}

    for kind in config_classes():
        with pytest.raises(AttributeError, match=f"^{kind.__qualname__} has no attribute"):
            kind.__new__(kind).unknown_one = 1


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        (rl.SFTConfig, "trianer", "SFTConfig has no attribute 'trianer'; did you mean trainer"),
        (rl.SessionConfig, "weigths", "did you mean weights"),
        (RolloutConfig, "num_generations", "Tiller's name is rollout.samples_per_prompt"),
        (rl.SFTConfig, "_own", "unexpected keyword argument '_own'"),
    ],
)
def test_a_misspelt_argument_is_refused_with_the_nearest_field(kind, name, text):
    with pytest.raises(TypeError, match=text):
        kind(**{name: 1})


@pytest.mark.parametrize(
    ("config", "place", "name", "text"),
    [
        ("gsm8k_jsonl", "task", "max_prompt_token", "did you mean max_prompt_tokens"),
        ("gsm8k_jsonl", "task", "longest_sequence", "Gsm8kJsonl.Config has no attribute"),
        ("sft_jsonl", "task", "held_out_pth", "SFTDataConfig .* did you mean held_out_path"),
        ("sft_jsonl", "task", "held_out", "did you mean held_out_path"),
        ("gsm8k_jsonl", "trainer", "micro_batch_sizes", "did you mean micro_batch_size"),
        ("gsm8k_jsonl", "trainer.training", "max_nrom", "TrainingConfig .* did you mean max_norm"),
        ("gsm8k_jsonl", "trainer.lr_scheduler", "warmup", "did you mean warmup_steps"),
        ("gsm8k_jsonl", "trainer.optimizer.param_groups.0", "patern", "did you mean pattern"),
        ("gsm8k_jsonl", "algorithm.loss", "clip_lo", "did you mean clip_low"),
        ("gsm8k_jsonl", "", "learning_rate", "RLConfig .*; Tiller's name is trainer.optimizer"),
    ],
)
def test_a_misspelt_field_is_refused_where_it_is_set(
    tmp_path, monkeypatch, config, place, name, text
):
    monkeypatch.syspath_prepend(tmp_path)
    module = f"misspelt_{name}"
    target = "config" + "".join(
        f"[{key}]" if key.isdigit() else f".{key}" for key in place.split(".") if key
    )
    (tmp_path / f"{module}.py").write_text(
        "from rl.cli.arguments import find_config\n"
        "from rl.config import RunConfig\n"
        f"def mine() -> RunConfig:\n    config = find_config({config!r})()\n"
        f"    {target}.{name} = 'x'\n    return config\n"
    )
    with pytest.raises(ConfigError, match=text) as error:
        load_config(f"{module}.mine")
    assert f"{name!r}" in str(error.value) and "line 5, in mine" in str(error.value)


def with_my_task():
    config = find_config("gsm8k_jsonl")()
    config.task = Mine.Config(path="questions.jsonl", max_prompt_tokens=8)
    config.task.part.sise = 2  # nothing of Tiller's is called here
    return config


def test_a_part_of_a_user_without_slots_is_refused_before_anything_starts(tmp_path, monkeypatch):
    text = "^task.part: Part has no attribute 'sise'; did you mean size"
    with pytest.raises(ConfigError, match=text):
        validate(with_my_task())
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_config.py").write_text(
        "from rl.config import RLConfig\nfrom tests.config import test_unknown_fields\n"
        "def mine() -> RLConfig:\n    return test_unknown_fields.with_my_task()\n"
    )
    with pytest.raises(ConfigError, match=text):  # overrides make new parts
        parse_config(["--config", "my_config.mine", "--steps", "3"], program="test")


def test_fields_caches_and_copies_of_a_config_still_work():
    config = Mine.Config(path="a", part=Part(4))
    config.max_prompt_tokens = 8
    config._cache = 1
    assert config.halves == 2
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert twin == config and twin._cache == 1
        with pytest.raises(AttributeError, match="did you mean path"):
            twin.pth = "b"
    assert dataclasses.replace(config, path="b").path == "b"
