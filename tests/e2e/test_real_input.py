"""A Hugging Face folder and a JSONL file: trained through the chat template, exported for
transformers.
"""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.train import main
from tests.e2e.runs import Run

SMALL = [
    "--steps",
    "8",
    "--rollout.prompts_per_step",
    "4",
    "--rollout.samples_per_prompt",
    "4",
    "--rollout.max_tokens",
    "32",
    "--evaluation.prompts",
    "8",
    "--generator.kv_cache_gib",
    "0.1",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    model = folder / "model"
    data = folder / "problems.jsonl"
    script = ["scripts/make_tiny_model.py", "--model-dir", str(model), "--data", str(data)]
    subprocess.run([sys.executable, *script], check=True, timeout=120)
    return model, data


def test_a_folder_and_a_file_train_and_the_export_generates(tmp_path, inputs):
    model, data = inputs
    arguments = [
        "--config",
        "gsm8k_jsonl",
        "--model.hf_path",
        str(model),
        "--task.path",
        str(data),
        *SMALL,
    ]
    run = Run(*arguments, folder=tmp_path / "run")
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


def test_an_unreadable_line_is_refused_by_number(tmp_path, inputs, capsys):
    model, data = inputs
    lines = data.read_text().splitlines()
    lines[6] = '{"question": "torn'
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join(lines))
    arguments = [
        "--config",
        "gsm8k_jsonl",
        "--model.hf_path",
        str(model),
        "--task.path",
        str(broken),
    ]
    assert main([*arguments, "--output-dir", str(tmp_path / "run")]) == 2
    assert f"{broken} line 7: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
