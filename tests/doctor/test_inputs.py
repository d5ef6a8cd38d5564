"""Models, tokenizers, chat templates, data and rewards with damage, each found with its fix."""

import json
import shutil
from pathlib import Path

import pytest

from rl.cli.arguments import find_config, shipped_configs
from rl.dialects.template import stop_tokens
from rl.doctor.data import check_template
from rl.model.tokenizer import load_tokenizer
from tests.doctor import broken_task
from tests.kit.tables import check_rows
from tests.kit.tokenizers import make_model


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without(name: str):
    """Return a damage that removes a file."""
    return lambda folder: (folder / name).unlink()


def template(old: str, new: str):
    """Return a damage that replaces text in the chat template."""

    def change(folder):
        path = folder / "tiny" / "chat_template.jinja"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


def data(*rows: str):
    """Return a damage that replaces the data by ``rows``."""
    return lambda folder: (folder / "tiny.jsonl").write_text("\n".join(rows) + "\n")


def problem(question: str, answer: str) -> str:
    return json.dumps({"question": question, "answer": f"#### {answer}"})


def spelled(folder):
    """Add each question of the data in capital letters."""
    path = folder / "tiny.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows += [row | {"question": row["question"].upper()} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


MANY = [problem(f"What is {n} and {n}?", str(2 * n)) for n in range(100)]
DAMAGED = {
    "no weights": (
        *(without("tiny/model.safetensors"), "error", "model.hf_path", "has no .*safetensors"),
        "save the model",
    ),
    "no tokenizer": (
        *(without("tiny/tokenizer.json"), "error", "model.hf_path", "has no tokenizer.json"),
        "save the tokenizer",
    ),
    "a stop token that does not exist": (
        lambda f: edit_json(f / "tiny" / "generation_config.json", eos_token_id=9999),
        *("error", "model.hf_path", "eos_token_id .* is 9999", "token ids of the tokenizer"),
    ),
    "a row without answer": (
        data(*MANY, problem("And?", "none")),
        *("error", "task.path", "line 101: field 'answer' does not end", "add the number"),
    ),
    "few questions": (
        data(*MANY[:4]),
        *("warning", "task", "the first step has 3 different prompts of 32", "add data"),
    ),
    "held-out questions that differ in case": (
        *(spelled, "warning", "held-out prompts", "are trained on", "remove the copies"),
    ),
    "two answers": (
        data(*MANY, *(problem(f"What is {n} and {n}?", "7") for n in range(100))),
        *("warning", "training prompts", "one prompt has the answers", "remove one"),
    ),
}


@pytest.fixture
def damaged(good_inputs, tmp_path, examine):
    """Return a function that returns what is found in a copy of the inputs with a damage."""

    def findings(case: str, damage) -> list[dict]:
        folder = shutil.copytree(good_inputs, tmp_path / case.replace(" ", "-"))
        damage(folder)
        config = find_config("gsm8k_jsonl")()
        config.model.hf_path = str(folder / "tiny")
        config.task.path = str(folder / "tiny.jsonl")
        return examine("gsm8k_jsonl", config)

    return findings


def test_damaged_inputs_are_found(damaged, matches):
    def check(case: str) -> None:
        damage, *expected = DAMAGED[case]
        matches(damaged(case, damage), *expected)

    check_rows(DAMAGED, check)


def test_stop_tokens_are_named_with_their_sources(good_inputs, tmp_path):
    def stop_elsewhere(folder):
        edit_json(folder / "tiny" / "tokenizer_config.json", eos_token="<|endoftext|>")
        edit_json(folder / "tiny" / "generation_config.json", eos_token_id=0)

    folder = shutil.copytree(good_inputs, tmp_path / "model")
    stop_elsewhere(folder)
    tokenizer = load_tokenizer(str(folder / "tiny"))
    stops = stop_tokens(tokenizer)
    (found,) = check_template(tokenizer, stops)
    assert str(found) == (
        "note     stop tokens: generation_config.json names <|endoftext|>, "
        "the tokenizer names <|endoftext|>, the chat template names <|im_end|>"
    )
    _, missing = check_template(tokenizer, [tokenizer.eos_token_id])  # of a task of its own
    assert "none of the stop tokens ['<|endoftext|>']" in missing.what


TEMPLATES = {
    "another family": (
        template("<|im_start|>' + message.role + '\\n'", "<|im_start|>' + message.role + ':'"),
        ["conversations of several turns are refused"],
    ),
    "another name of the assistant": (
        template("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>bot\\n' }}"),
        ["which no answered conversation begins with", "several turns are refused"],
    ),
    "no content": (
        template("+ content.lstrip('\\n')", ""),
        ["it leaves out what the assistant says", "several turns are refused"],
    ),
}


def test_a_template_of_its_own_is_found(damaged):
    def check(case: str) -> None:
        damage, expected = TEMPLATES[case]
        found = damaged(case, damage)
        assert {(each["severity"], each["where"]) for each in found} == {
            ("warning", "chat template")
        }
        for said, each in zip(expected, found, strict=True):
            assert said in each["what"] and each["fix"]

    check_rows(TEMPLATES, check)


FAULTS = {
    "constructor": ("error", "task", "building Broken: .* FileNotFoundError", "correct it there"),
    "leak": ("warning", "held-out prompts", "50 of 256 held-out prompts", "remove the copies"),
    "few prompts": ("warning", "task", "3 different prompts of 32", "add data"),
    "two answers": ("warning", "training prompts", "one prompt has the answers", "remove one"),
    "ends": ("warning", "training prompts", "1000 of 1000 .* stop token", "add_special_tokens"),
    "bos twice": ("warning", "training prompts", "bos_token twice", "add_special_tokens=False"),
    "no tokens": ("error", "task", r"prompt\(0\) has tokens=\[\]; .*at least one", "correct it"),
    "late": ("error", "task", r"prompt\(900\) has tokens=\[\]; .*at least one", "correct it"),
    "no held out": ("error", "evaluation.prompts", "holds out no prompts", "set it to 0"),
    "random": ("warning", "Broken", "the same completions have the rewards", "derive"),
    "constant": ("warning", "Broken", "is 0.25 for the reference answer", "prompt.answer"),
    "empty": ("warning", "Broken", "no text gets 1.0, the reference answer 0.25", "no answer"),
    "nan": ("error", "Broken", "reward=nan", "finite numbers"),
    "raises": ("error", "Broken", "raised KeyError", "return a Score"),
    "number": ("error", "Broken", "returned 0.5, which is not a Score", "return a Score"),
    "hangs": ("warning", "Broken", "0 of 8 groups were scored", "hangs"),
}


def test_faults_of_a_task_are_found(examine, matches, monkeypatch):
    def check(fault: str) -> None:
        config = broken_task.broken()
        config.task.fault = fault
        monkeypatch.setattr("rl.doctor.data.DEADLINE_S", 0.3 if fault == "hangs" else 60.0)
        matches(examine("broken", config), *FAULTS[fault])

    check_rows(FAULTS, check)


ENVIRONMENT_FAULTS = {
    "random": ("warning", "BrokenEpisodes", "the same completions have the rewards", "derive"),
    "nan": ("error", "BrokenEpisodes", "reward=nan", "correct it"),
    "raises": ("error", "BrokenEpisodes", "raised KeyError", "correct it"),
    "no messages": ("error", "BrokenEpisodes", "cannot be rendered", "correct it"),
}


def test_faults_of_an_environment_are_found(good_inputs, examine, matches):
    def check(fault: str) -> None:
        config = broken_task.broken_episodes()
        config.model.hf_path = str(good_inputs / "tiny")
        config.task.fault = fault
        found = examine("broken_episodes", config)
        if fault:
            matches(found, *ENVIRONMENT_FAULTS[fault])
        else:
            assert found == []

    check_rows(["", *ENVIRONMENT_FAULTS], check)


def test_answers_that_do_not_fit_are_found(doctor, matches):
    code, found = doctor("--config", "quickstart", "--rollout.max_tokens", "3")
    assert code == 0
    expected = ("1000 of 1000 answers are longer, up to 4", "set it to 4 or more")
    matches(found, "warning", "rollout.max_tokens", *expected)


CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}]}
    for n in range(40)
]


def chats(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("rows", "held_out", "expected"),
    [
        ([*CHATS, {"messages": 3}], [], ("error", "task.path", "line 41", "")),
        (
            CHATS,
            CHATS[:5],
            ("warning", "held-out examples", "5 of 5 held-out examples are trained on", "copies"),
        ),
    ],
)
def test_damaged_conversations_are_found(
    rows, held_out, expected, good_inputs, tmp_path, doctor, matches
):
    files = ["--model.hf_path", good_inputs / "tiny", "--task.path", chats(tmp_path / "a", rows)]
    if held_out:
        files += ["--task.held_out_path", chats(tmp_path / "b", held_out)]
    code, found = doctor("--config", "sft_jsonl", *files)
    assert code == (2 if "error" in expected else 0)
    matches(found, *expected)


@pytest.fixture
def inputs_of(good_inputs, tmp_path):
    """Return a function that returns model and data for a shipped config that reads files."""
    longer = shutil.copytree(good_inputs / "tiny", tmp_path / "longer")
    edit_json(longer / "config.json", max_position_embeddings=32768)
    conversations = chats(tmp_path / "chats.jsonl", CHATS)
    pairs = [{"prompt": f"{n}?", "chosen": "Yes.", "rejected": "No."} for n in range(40)]
    preferences = chats(tmp_path / "pairs.jsonl", pairs)

    def files(name: str) -> tuple[Path, Path]:
        if name in ("sft_jsonl", "smollm2_sft", "tool_demonstrations"):
            return longer, conversations
        if name in ("dpo_jsonl", "reward_model_jsonl"):
            return longer, preferences
        return longer, good_inputs / "tiny.jsonl"

    return files


def test_shipped_configs_have_no_findings(inputs_of, tmp_path, examine):
    def check(name: str) -> None:
        config = find_config(name)()
        if name == "tool_quickstart":
            config.model.hf_path = str(make_model(tmp_path, "--calculator"))
        elif name != "quickstart":
            model, data = inputs_of(name)
            config.model.hf_path = str(model)
            config.task.path = str(data)
        if "a3b" in name:
            config.trainer.parallelism.expert_parallel_degree = 1
        found = examine(name, config)
        assert not [each for each in found if each["severity"] == "error"], found
        places = {each["where"] for each in found}
        assert places - {"hardware.device"} == set(), found
        assert ("hardware.device" in places) == name.startswith(("qwen", "llama"))

    others = {"serve_tiny", "benchmarks", *find_config("benchmarks")().task.tasks}
    check_rows([name for name in shipped_configs() if name not in others], check)


def test_nothing_is_found_without_a_config(doctor):
    code, found = doctor()
    assert (code, [each for each in found if each["severity"] == "error"]) == (0, [])
