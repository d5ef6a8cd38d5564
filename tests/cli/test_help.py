"""Help texts of configs."""

import fnmatch
import re

import pytest

from rl.cli.arguments import SHIPPED, all_fields, common_fields, parse_config, shipped_configs
from rl.cli.help import GROUPS, shipped_sources
from tests.kit.command_line import PROGRAM
from tests.kit.tables import check_rows


def printed(*arguments: str, capsys) -> str:
    """Return the help text that ``parse_config`` prints before it exits with 0."""
    with pytest.raises(SystemExit) as end:
        parse_config(arguments, program=PROGRAM)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_all_shows_each_field_with_its_default_and_its_text(capsys):
    def check(name: str) -> None:
        text = printed("--config", name, "--help-all", capsys=capsys)
        lines = text.splitlines()
        rows = [" ".join(line.split()) for line in lines if line.startswith("  --")]
        fields = all_fields(shipped_configs()[name]())
        assert len(fields) > 100
        for field, (default, limits, _) in fields.items():
            (row,) = [row for row in rows if row.split(" ", 1)[0] == f"--{field}"]
            assert row == " ".join(f"--{field} {default} {limits}".split())
        seed = lines.index(next(line for line in lines if line.startswith("  --seed ")))
        assert lines[seed + 1].startswith("      Seed of ")

    check_rows(shipped_configs(), check)


def test_help_shows_the_common_fields_of_a_config(capsys):
    def check(name: str) -> None:
        text = printed("--config", name, "--help", capsys=capsys)
        config = shipped_configs()[name]()
        assert f"  --steps {config.steps}  " in text
        sizes = f"  --trainer.micro_batch_size {config.trainer.micro_batch_size}  "
        assert sizes in text
        assert len(text.splitlines()) <= 66
        assert max(map(len, text.splitlines())) <= 100

    check_rows(shipped_configs(), check)


def test_every_common_field_is_one_of_a_shipped_config(capsys):
    shown = {name for make in shipped_configs().values() for name in common_fields(make())}
    patterns = [pattern for words in GROUPS.values() for pattern in words]
    assert [each for each in patterns if not fnmatch.filter(shown, each)] == []


def test_help_shows_what_a_changed_shipped_config_returns(tmp_path, monkeypatch, capsys):
    before = printed("--config", "quickstart", "--help", capsys=capsys)
    source = (SHIPPED / "quickstart.py").read_text()
    (tmp_path / "quickstart.py").write_text(source.replace("steps=200", "steps=201"))
    for module, cached in (("rl.cli.arguments", shipped_configs), ("rl.cli.help", shipped_sources)):
        monkeypatch.setattr(f"{module}.SHIPPED", tmp_path)
        monkeypatch.setattr(f"{module}.{cached.__name__}", cached.__wrapped__)
    after = printed("--config", "quickstart", "--help", capsys=capsys)
    assert after.replace("--steps 201", "--steps 200") == before != after


def test_help_shows_the_common_fields_of_a_users_config(package, capsys):
    text = printed("--config", f"{package}.loud", "--help", capsys=capsys)
    assert text.startswith(f"usage: {PROGRAM} --config {package}.loud ")
    assert "  --task.loudness 2\n" in text
    text = printed("--config", f"{package}.loud", "--help-all", capsys=capsys)
    assert "--task.loudness" in text and "--rollout.max_tokens" in text


def test_help_without_a_config_lists_the_configs(capsys):
    text = printed("--help", capsys=capsys)
    assert [*shipped_sources()] == [*re.findall(r"^  (\w+)  +[A-Z]", text, re.MULTILINE)]
    assert {*shipped_sources()} == {*shipped_configs()}
