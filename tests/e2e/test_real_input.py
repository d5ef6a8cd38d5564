"""The README's examples: your own model, data, task, loss and algorithm."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import warm
from tests.kit.pages import blocks, commands
from tests.kit.runs import Run

SMALL = ["--rollout.samples_per_prompt", "4", "--generator.kv_cache_gib", "0.1"]


def readme_run(name: str, inputs: tuple[Path, Path]) -> list[str]:
    """Return the arguments of the README's run of a config, on these inputs."""
    model, data = map(str, inputs)
    places = {"tiny": model, "tiny.jsonl": data}
    found = [command for block in blocks("README.md", "bash") for command in commands(block)]
    (command,) = [each for each in found if each[1:2] == ["-m"] and name in each]
    return [places.get(word, word) for word in command[3:]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    model = folder / "model"
    data = folder / "problems.jsonl"
    made = warm.run(
        *("scripts/make_tiny_model.py", "--model-dir", model, "--data", data), timeout=300
    )
    assert made.returncode == 0, made.stderr
    return model, data


@pytest.mark.long
def test_a_folder_and_a_file_train_and_the_export_generates(tmp_path, inputs):
    model, _ = inputs
    run = Run(*readme_run("gsm8k_jsonl", inputs), *SMALL, folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert len(run.metrics()) == 8
    assert max(row["logprob/error_max"] for row in run.metrics()) <= 1e-5
    assert run.json("summary.json")["eval/prompts"] == 8

    export = run.folder / "export"
    tokenizer = AutoTokenizer.from_pretrained(export)
    trained, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    original = AutoModelForCausalLM.from_pretrained(model)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(trained.parameters(), original.parameters(), strict=True)
    ), "training changed nothing"
    chat = [{"role": "user", "content": "Ada has 2 pens. Bo has 3. How many together?"}]
    encoded = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generated = trained.generate(**encoded, max_new_tokens=8, do_sample=False)
    assert generated.shape[1] > encoded["input_ids"].shape[1]


def test_the_readmes_task_loss_and_algorithm_train(tmp_path, inputs):
    for block in blocks("README.md", "python"):
        if block.module:
            (tmp_path / f"{block.module}.py").write_text(block.code)
    arguments = readme_run("my_run.my_run", inputs)
    run = Run(*arguments, *SMALL, folder=tmp_path / "run", pythonpath=tmp_path)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert all(0.8 < row["ratio/soft"] < 1.2 for row in run.metrics())
    assert all(0 < row["best/share"] <= 1 for row in run.metrics())
    assert run.json("config.json")["config"]["algorithm"]["width"] == 0.2
