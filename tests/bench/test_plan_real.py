"""The benchmark of the plan, on a tiny model in place of the published one."""

import json
import shutil

import pytest

from tests.kit.chats import chat_rows, preference_rows
from tests.kit.scripts import module_fixture

plan_real = module_fixture("scripts/bench/plan_real.py")


@pytest.mark.long
def test_a_plan_is_compared_with_a_run_of_each_kind(plan_real, chat_model, tmp_path, capsys):
    problems = tmp_path / "problems"
    problems.mkdir()
    shutil.copy(chat_model.parent / "problems.jsonl", problems / "train.jsonl")
    for name, rows in (("solved", chat_rows(40)), ("pairs", preference_rows(20))):
        (problems / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    folders = ["--model", str(chat_model), "--problems", str(problems)]
    plan_real.main([*folders, "--steps", "2", "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = {name.partition(",")[0] for name in found["configs"]}
    assert names == {*plan_real.KINDS}
    for row in found["configs"].values():
        assert min(row.values()) > 0
        for name in ("step", "memory"):
            assert found[f"worst_{name}"] >= 1
