"""Every field of a config acts, as a test shows, or is refused with what to use instead (C9)."""

import ast
import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

from rl.algorithms.losses import ClippedLoss, PolicyLoss
from rl.algorithms.sequence_losses import DPOLoss, SimPOLoss
from rl.cli.arguments import find_config
from rl.errors import ConfigError
from rl.types.rules import Fixed, rule_of
from rl.validation import validate
from rl.validation.values import values
from tests.config.fields import ACTS
from tests.config.refused_fields import REFUSED, REFUSED_BY_KIND
from tests.kit.chats import tiny_chat_model
from tests.kit.full_config import full_config, put
from tests.kit.scripts import module_fixture
from tests.kit.tables import check_rows

TESTS = Path(__file__).parents[1]
LOSSES = "algorithms/test_losses.py::test_loss_and_gradient_match_the_papers"
KINDS = {
    "RLConfig": "quickstart",
    "SFTConfig": "sft_jsonl",
    "PreferenceConfig": "dpo_jsonl",
    "RewardModelConfig": "reward_model_jsonl",
    "ServeConfig": "serve_tiny",
}


script = module_fixture("scripts/make_configuration_md.py", scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder of a model that chats, with the folder ``checkpoint`` of a complete checkpoint."""
    folder = tiny_chat_model(tmp_path_factory.mktemp("model"))
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / ".metadata").touch()
    return folder


OF_RL = ("RolloutConfig", "Gsm8kJsonl.Config")
"""Sections of RLConfig alone."""


def config_of(kind: str, folder: Path) -> Any:
    """Return a valid config of ``kind`` with as many sections as can be."""
    if kind == "RLConfig":
        return full_config(folder / "checkpoint")
    config = find_config(KINDS[kind])()
    if kind == "ServeConfig":
        return config
    config.model.hf_path = str(folder)
    config.model.max_seq_len = 128
    config.task.max_tokens = 96
    return config


LOSSES = "algorithms/test_losses.py::test_loss_and_gradient_match_the_papers"
"""Test of the fields of all losses of a policy."""


def acting(script) -> dict[str, str]:
    """Return the test of each field that acts. A field of a loss without an entry acts on costs."""
    found: dict[str, str] = {}
    for line in ACTS.splitlines():
        words = line.split()
        if not line.startswith(" "):
            path = words.pop(0)
        elif words[0].endswith(":"):
            test = f"{path}::{words.pop(0)[:-1]}"
        for name in words[1:]:
            field = f"{words[0]}.{name}"
            assert field not in found, f"{field} has two tests"
            found[field] = test
    for loss in (kind for kind in script.sections() if issubclass(kind, PolicyLoss.Config)):
        for name, _ in script.own_fields(loss):
            found.setdefault(f"{loss.__qualname__}.{name}", LOSSES)
    return found


@cache
def source_of(path: Path) -> str:
    """Return the text of a test's file, its conftest and its imports, with underscores."""
    text = path.read_text()
    conftest = path.parent / "conftest.py"
    helpers = [
        TESTS.parent / f"{name.replace('.', '/')}.py"
        for name in re.findall(r"^from (tests[\w.]*) import", text, re.MULTILINE)
    ]
    files = [each.read_text() for each in (conftest, *helpers) if each.is_file()]
    return re.sub(r"(?<=\w)-(?=\w)", "_", "\n".join([text, *files]))


def test_every_field_is_known_and_no_entry_is_stale(script):
    def leaves(script) -> set[str]:
        """Return the fields that hold no section, each as CLASS.FIELD."""
        return {
            f"{kind.__qualname__}.{name}"
            for kind in script.sections()
            for name, hint in script.own_fields(kind)
            if not [*script.dataclasses_in(hint)]
        }

    known = [*acting(script), *REFUSED]
    assert len(known) == len({*known}), "a field acts and is refused"
    assert {*known} == leaves(script)


@cache
def names_in(path: Path) -> set[str]:
    """Return the functions and classes of a file."""
    return {each.name for each in ast.parse(path.read_text()).body if hasattr(each, "name")}


def test_every_entry_refers_to_code_with_its_field(script):
    entries = acting(script)

    def check(field: str) -> None:
        place, name = entries[field].split("::")
        path = TESTS / place
        assert name.startswith("test_")
        assert name in names_in(path), f"{place}::{name}"
        word = re.compile(rf"\b(no_)?{field.split('.')[-1]}\b")
        assert word.search(source_of(path)), f"{place} does not name {field}"

    check_rows(entries, check)


@pytest.fixture(scope="module")
def prepared(folder):
    """Return a function that returns a valid config of a kind that has the section of a field."""

    @cache
    def valid(kind: str, quantized: bool) -> Any:
        config = config_of(kind, folder)
        if quantized:
            config.trainer.float8 = Float8LinearConverter.Config(emulate=True)
        validate(config)
        return config

    return lambda kind, field="": deepcopy(valid(kind, field.startswith("QuantizationConverter")))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ServeConfig"])
def test_a_field_without_an_effect_is_refused_with_what_to_use(kind, prepared):
    def places_of(config: Any, kind: str) -> list[str]:
        """Return the sections of ``config`` that are of the dataclass named ``kind``."""
        return [
            value.name
            for value in values(config)
            if kind in {each.__qualname__ for each in type(value.content).__mro__}
        ]

    def check(field: str) -> None:
        section, name = field.rsplit(".", 1)
        value, instead = REFUSED[field]
        whole = prepared(kind, field)
        if section == "Gsm8kJsonl.Config" and kind == "RLConfig":
            whole.task = find_config("gsm8k_jsonl")().task
        places = places_of(whole, section)
        if section in OF_RL and kind != "RLConfig":
            assert places == []
            return
        assert places
        for place in places:
            config = put(deepcopy(whole), f"{place}.{name}", value)
            with pytest.raises(ConfigError) as error:
                validate(config)
            assert str(error.value).startswith(f"{place}.{name} is {value!r}"), error.value
            assert instead in str(error.value)

    check_rows(REFUSED, check)


@pytest.mark.parametrize("kind", REFUSED_BY_KIND)
def test_a_field_without_an_effect_in_a_kind_of_run_is_refused(kind, prepared):
    def check(field: str) -> None:
        value, instead = REFUSED_BY_KIND[kind][field]
        with pytest.raises(ConfigError) as error:
            validate(put(prepared(kind), field, value))
        assert str(error.value).startswith(f"{field} is {value!r}")
        assert instead in str(error.value)

    check_rows(REFUSED_BY_KIND[kind], check)


ABSENT = {
    "reference.refresh_every": (5, "kl_coef above 0"),
    "reference.parallelism.data_parallel_shard_degree": (2, "kl_coef above 0"),
    "critic.checkpoint": ("/judge", "algorithm.advantage with values"),
    "critic.lr_scheduler.warmup_steps": (5, "algorithm.advantage with values"),
    "critic.optimizer.param_groups.0.optimizer_name": ("Adam", "algorithm.advantage with values"),
}


def test_a_field_of_a_model_that_the_algorithm_does_not_have_is_refused():
    def check(field: str) -> None:
        value, instead = ABSENT[field]
        with pytest.raises(ConfigError, match=instead) as error:
            validate(put(find_config("quickstart")(), field, value))
        assert str(error.value).startswith(f"{field} is {value!r}; it must be ")

    validate(find_config("quickstart")())
    check_rows(ABSENT, check)


@pytest.mark.parametrize("loss", [DPOLoss.Config(), SimPOLoss.Config()], ids=["dpo", "simpo"])
def test_fields_of_a_reference_are_refused_for_losses_without_one(loss, folder):
    config = config_of("PreferenceConfig", folder)
    config.loss = loss
    config.reference.scores = "cached"
    if isinstance(loss, DPOLoss.Config):
        validate(config)
    else:
        with pytest.raises(ConfigError, match="reference.scores is 'cached'; it must be 'comput"):
            validate(config)


def test_every_field_that_keeps_its_default_is_tested(script):
    kept = {
        f"{kind.__qualname__}.{name}"
        for kind in script.sections()
        for name, hint in script.own_fields(kind)
        if rule_of(hint, Fixed)
    }
    assert len(kept) > 20
    assert kept - {*REFUSED} == set()


def test_options_of_recomputed_layers_are_refused_with_a_memory_budget(folder):
    config = config_of("SFTConfig", folder)
    config.trainer.compile.enable = True
    config.trainer.activation_checkpoint = MemoryBudgetAC.Config()
    validate(config)

    def check(option: tuple[str, Any]) -> None:
        changed = deepcopy(config)
        setattr(changed.trainer.activation_checkpoint, *option)
        match = f"checkpoint.{option[0]} is .*: .*; set memory_budget"
        with pytest.raises(ConfigError, match=match):
            validate(changed)

    options = {"preserve_rng_state": False, "determinism_check": "none", "debug": True}
    check_rows(options.items(), check)


@pytest.mark.parametrize(
    ("kind", "loss", "message"),
    [
        ("SFTConfig", ClippedLoss.Config(), "loss is ClippedLoss.Config; .*needs advantages"),
        ("RewardModelConfig", DPOLoss.Config(), "loss is DPOLoss.Config; it must be a loss of va"),
    ],
)
def test_a_loss_of_another_kind_of_run_is_refused(kind, loss, message, folder):
    config = config_of(kind, folder)
    config.loss = loss
    with pytest.raises(ConfigError, match=message):
        validate(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("param_groups.0.optimizer_kwargs.wieght_decay", "has 'wieght_decay'; AdamW takes lr, be"),
        ("optimizer_factory_kwargs_by_name.SGD", "has 'SGD'; it must be the optimizer_name of one"),
    ],
)
def test_options_that_no_optimizer_takes_are_refused(change, message, folder):
    for field in ("trainer", "critic"):
        config = put(config_of("RLConfig", folder), f"{field}.optimizer.{change}", {})
        section = change.rpartition(".")[0]
        with pytest.raises(ConfigError, match=f"^{field}.optimizer.{section} {message}"):
            validate(config)
