"""A name of another trainer is refused with Tiller's name: on the command line and in code."""

import pytest

from rl.cli.arguments import all_fields, load_config, parse_config, shipped_configs
from rl.config.other_names import OTHER_NAMES
from rl.errors import ConfigError
from tests.kit.tables import check_rows


def test_every_new_name_is_a_field_or_a_section_and_no_other_name_is():
    fields = {name for make in shipped_configs().values() for name in all_fields(make())}
    sections = {name[:end] for name in fields for end, sign in enumerate(name) if sign == "."}
    assert {*OTHER_NAMES.values()} - fields - sections == set()
    assert {*OTHER_NAMES} & (fields | sections) == set()


def test_the_command_line_refuses_a_name_of_another_trainer_by_tillers():
    def refusal(*arguments: str) -> str:
        with pytest.raises(ConfigError) as error:
            parse_config(["--config", "quickstart", *arguments], program="test")
        return str(error.value)

    def check(name: str) -> None:
        expected = f"{name}: Tiller's name of this field is --{OTHER_NAMES[name]}"
        assert refusal(f"--{name}", "1") == f"--{expected}"
        assert refusal(f"--{name.replace('_', '-')}=1").endswith(OTHER_NAMES[name])
        assert refusal(f"{name}=1") == expected  # as Hydra takes it

    check_rows(OTHER_NAMES, check)


@pytest.mark.parametrize(
    ("body", "new"),
    [
        ("RolloutConfig(num_generations=8)", "rollout.samples_per_prompt"),
        ("setattr(quickstart().trainer, 'max_grad_norm', 1.0)", "trainer.training.max_norm"),
    ],
    ids=["argument", "attribute"],
)
def test_a_config_function_is_refused_with_tillers_name(tmp_path, monkeypatch, body, new):
    monkeypatch.syspath_prepend(tmp_path)
    module = f"mine_{abs(hash(body))}"
    lines = "from configs.quickstart import quickstart\nfrom rl.config import RLConfig\n"
    lines += "from rl.config import RolloutConfig\n"
    (tmp_path / f"{module}.py").write_text(f"{lines}def mine() -> RLConfig:\n    return {body}\n")
    with pytest.raises(ConfigError, match=f"; Tiller's name is {new}; correct it there"):
        load_config(f"{module}.mine")
