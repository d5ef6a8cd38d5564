"""Families by the command line: the table of docs/your-model.md, and model folders whose shape
depends on other fields of the config than ``model.hf_path``.
"""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rl.model.families import BUILT_IN, family_named
from tests import warm
from tests.e2e.pipelines import EXPERTS
from tests.kit.chats import chat_rows
from tests.kit.model_cases import GPT_OSS
from tests.kit.model_folders import Folder
from tests.kit.pages import blocks, commands, text_of
from tests.kit.runs import TINY, Run
from tests.kit.tokenizers import qwen3

RUN = """\
--config sft_jsonl --model.max_seq_len 128 --task.max_tokens 96 --task.held_out_fraction 0.2
--examples_per_step 4 --validate_every 0 --steps 1"""
SEED_OSS = Folder(
    {"residual_dropout": 0.0, "attention_dropout": 0.0, "mlp_bias": True}, family="seed_oss"
)
FOLDERS: dict[str, tuple[Folder, str]] = {
    "the documentation's family": (SEED_OSS, "--model.family my_families.seed_oss"),
    "a window longer than max_seq_len": (Folder({"sliding_window": 700}, family="mistral"), ""),
    "a window as long as max_seq_len": (
        Folder(GPT_OSS | {"sliding_window": 128}, family="gpt_oss"),
        "",
    ),
    "a bias of experts": (Folder(experts=True), "--model.expert_bias"),
}


PAGE = "docs/your-model.md"
SECTION = text_of(PAGE).split("\n## ")[1]
ROWS = re.findall(r"^\| .*?`(\w+)` \|", SECTION, re.MULTILINE)[1:]
"""Last model type of each row."""


def test_the_table_has_all_families():
    assert sorted(ROWS) == sorted(BUILT_IN)


@pytest.mark.long
@pytest.mark.parametrize("family", BUILT_IN)
def test_the_commands_of_the_table_train_each_family(tmp_path, family):
    (shown,) = [each for each in blocks(PAGE, "bash") if "--family" in each.code]
    places = {"llama": family, "DIR": f"{tmp_path}/model", "FILE": f"{tmp_path}/rows.jsonl"}
    made, *runs = [[places.get(word, word) for word in each] for each in commands(shown)]
    done = warm.run(*made[1:], timeout=500)
    assert done.returncode == 0, done.stderr
    for command in runs:
        arguments = command[3:]
        if "quickstart" in arguments:
            arguments += [*TINY[2:], *(EXPERTS if family_named(family).has_experts else ())]
        run = Run(*arguments, folder=tmp_path / arguments[1])
        assert run.wait() == 0, run.stderr
        run.assert_nothing_left()
        (step,) = run.metrics()
        assert step["trainer/grad_norm"] > 1e-3
        assert step.get("reward/zero_std_groups", 0) < 1
        assert step.get("logprob/error_max", 0) <= 1e-5


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Variables with which programs find the family of the documentation."""
    text = Path("docs/your-model.md").read_text()
    module = tmp_path / "modules" / "my_families" / "seed_oss.py"
    module.parent.mkdir(parents=True)
    module.write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    return os.environ | {"PYTHONPATH": f"{module.parents[1]}:{Path.cwd()}"}


@pytest.mark.long
@pytest.mark.parametrize("name", FOLDERS)
def test_every_program_takes_a_folder_whose_shape_depends_on_other_fields(
    tmp_path, environment, name
):
    def write(folder: Folder, path: Path) -> Path:
        """Write a model with a tokenizer that fits it."""
        replace(folder, sizes=folder.sizes | {"vocab_size": 512}).write(path)
        qwen3().save_pretrained(path)
        return path

    folder, options = FOLDERS[name]
    model = write(folder, tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in chat_rows(20)))
    config = [*RUN.split(), *options.split(), "--model.hf_path", model, "--task.path", rows]

    def run(program: str, *arguments: str | Path) -> None:
        done = warm.run(program, *arguments, timeout=500, env=environment)
        assert done.returncode == 0, done.stderr + done.stdout

    run("rl.plan", *config)
    run("rl.doctor", *config)
    out = tmp_path / "run"
    run("rl.train", *config, "--output-dir", out)
    assert json.loads((out / "summary.json").read_text())["steps"] == 1
    run("rl.export", out, tmp_path / "exported")
    run("rl.evaluate", out / "export", "--config", out / "config.json")
