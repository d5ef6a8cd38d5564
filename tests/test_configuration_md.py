"""docs/configuration.md has every field, and says of it what the field says."""

import pytest

from rl.types.rules import Bounds, at_least
from rl.validation.values import values
from tests.kit.full_config import full_config
from tests.kit.scripts import module_fixture

SCRIPT = "scripts/make_configuration_md.py"


script = module_fixture(SCRIPT)


def test_the_page_and_the_fields_that_help_shows_are_up_to_date(script):
    for text, path in ((script.page(), script.PAGE), (script.common(), script.COMMON_FIELDS)):
        up_to_date = text == path.read_text()
        assert up_to_date, f"run {SCRIPT}: {path} is out of date"


def test_every_field_of_ours_has_a_docstring(script):
    bare = [
        f"{kind.__qualname__}.{name}"
        for kind in script.sections()
        if kind.__module__.startswith("rl.")
        for name, hint in script.own_fields(kind)
        if name not in script.docstrings_of(kind) and not [*script.dataclasses_in(hint)]
    ]
    assert not bare, f"write a docstring below the fields {bare}"


def test_every_value_of_a_config_is_of_a_field_on_the_page(script, tmp_path):
    text = script.PAGE.read_text()
    config = full_config(tmp_path)
    config.roles["NAME"] = config.roles.pop("judge")
    shared = ("reference.", "critic.", "roles.NAME.model.", "roles.NAME.parallelism.")
    names = [value.name for value in values(config) if value.name]
    own = [name for name in names if not any(part.isdigit() for part in name.split("."))]
    missing = [name for name in own if f"**`{name}`**" not in text and not name.startswith(shared)]
    assert missing == ["roles.NAME"]


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (at_least(1, 10**6), "from 1 to 1,000,000"),
        (at_least(2, 10, also=(0,)), "from 2 to 10 or 0"),
        (Bounds(0, 1, above=True, below=True), "above 0 and below 1"),
        (at_least(-1e6, 1e15), "from -1,000,000 to 1e+15"),
    ],
)
def test_ranges_are_said_in_words(script, bounds, said):
    assert script.range_text(bounds) == said
