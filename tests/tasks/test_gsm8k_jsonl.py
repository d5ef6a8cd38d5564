import json
import shutil
from dataclasses import dataclass, replace

import pytest

from rl.errors import ConfigError
from rl.model.shape import ModelConfig, shape_of
from rl.tasks.base import Task, showing_progress
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.tasks.mixture import Mixture
from rl.types import Completion

SILENT = Completion(tokens=[], logprobs=[], versions=[], finish_reason="stop")


def build(tiny, seed=0, model=None, **config):
    model = model or ModelConfig(hf_path=str(tiny[0]))
    return Gsm8kJsonl.Config(**{"path": str(tiny[1]), **config}).build(seed=seed, model=model)


def write(path, *lines):
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    return str(path)


def problem(number):
    return {"question": f"What is {number}?", "answer": f"It is.\n#### {number}"}


def test_prompts_are_the_chat_template_with_the_question_in_it(tiny):
    task = build(tiny, system_prompt="Be brief.", instruction="Answer as #### N")
    prompt = task.prompt(0)
    head, question = prompt.text.split("<|im_start|>user\n")
    assert head == "<|im_start|>system\nBe brief.<|im_end|>\n"
    no_thinking = "<think>\n\n</think>\n\n"
    assert question.endswith(f"?\nAnswer as #### N<|im_end|>\n<|im_start|>assistant\n{no_thinking}")
    assert task.tokenizer.decode(prompt.tokens) == prompt.text
    assert "<|im_end|>" not in task.decode(prompt.tokens)


def test_a_prompt_with_thinking_leaves_the_thought_to_the_model(tiny):
    prompt = build(tiny, enable_thinking=True).prompt(0)
    assert prompt.text.endswith("<|im_start|>assistant\n")


def test_stop_tokens_come_from_tokenizer_and_generation_config(tiny, tmp_path):
    task = build(tiny)
    assert set(task.tokenizer.convert_ids_to_tokens(task.stop_token_ids)) == {
        "<|im_end|>",
        "<|endoftext|>",
    }
    folder = shutil.copytree(tiny[0], tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert build(tiny, model=ModelConfig(hf_path=str(folder))).stop_token_ids == (2, 7)
    (folder / "generation_config.json").unlink()
    assert build(tiny, model=ModelConfig(hf_path=str(folder))).stop_token_ids == (2,)


def test_training_and_evaluation_share_no_question_and_lose_none(tiny, tmp_path):
    lines = [problem(number) for number in range(40)]
    task = build(tiny, path=write(tmp_path / "twice.jsonl", *lines, *lines), held_out_fraction=0.2)
    held_out = {prompt.text for prompt in task.eval_prompts(100)}
    trained = {task.prompt(prompt_id).text for prompt_id in range(200)}
    assert len(held_out) == 8
    assert not held_out & trained
    assert len(held_out | trained) == 40


def test_prompts_are_a_function_of_seed_and_ordinal(tiny):
    forward = [build(tiny).prompt(prompt_id) for prompt_id in range(130)]
    task = build(tiny)
    assert [task.prompt(prompt_id) for prompt_id in reversed(range(130))] == forward[::-1]
    assert [prompt.prompt_id for prompt in forward] == list(range(130))
    other = build(tiny, seed=1)
    assert [other.prompt(prompt_id).text for prompt_id in range(130)] != [
        prompt.text for prompt in forward
    ]
    assert other.eval_prompts(3) == task.eval_prompts(3)


def test_eval_prompts_are_at_most_those_held_out(tiny):
    task = build(tiny)
    assert [prompt.prompt_id for prompt in task.eval_prompts(4)] == [0, 1, 2, 3]
    assert len(task.eval_prompts(1000)) == 6


def test_the_reward_is_one_for_the_right_number_and_zero_otherwise(tiny):
    task = build(tiny)
    prompt = task.prompt(0)
    right = task.score(prompt, f"so it is\n#### {prompt.answer}.0", SILENT)
    assert (right.reward, right.correct, right.metrics) == (
        1.0,
        True,
        {"answered": 1.0, "format": 1.0},
    )
    wrong = task.score(prompt, f"{prompt.answer}1", SILENT)
    assert (wrong.reward, wrong.correct, wrong.metrics) == (
        0.0,
        False,
        {"answered": 1.0, "format": 0.0},
    )
    assert task.score(prompt, "", SILENT).metrics["answered"] == 0.0


def test_a_reward_worker_scores_without_reading_the_data(tiny):
    config = Gsm8kJsonl.Config(path="/nowhere/x.jsonl")
    model = ModelConfig(hf_path=str(tiny[0]))
    prompt = build(tiny).prompt(0)
    scorer = config.build_scorer(seed=0, model=model)
    assert scorer.score(prompt, f"#### {prompt.answer}", SILENT).correct
    assert scorer.decode(prompt.tokens) == build(tiny).decode(prompt.tokens)
    mixed = Mixture.Config(tasks={"one": config, "two": Mixture.Config(tasks={"three": config})})
    named = replace(prompt, task="two/three")
    assert (
        mixed.build_scorer(seed=0, model=model)
        .score(named, f"#### {prompt.answer}", SILENT)
        .correct
    )


class ScoresByItsPrompts(Gsm8kJsonl):
    """Needs its prompts to score, and takes no argument that it does not know."""

    @dataclass(kw_only=True, slots=True)
    class Config(Gsm8kJsonl.Config):
        pass

    def __init__(self, config, *, seed, model):
        super().__init__(config, seed=seed, model=model)
        self.known = {question.text for question in self.train}


def test_a_task_of_the_users_own_is_built_whole_for_its_reward_worker(tiny):
    config = ScoresByItsPrompts.Config(path=str(tiny[1]))
    model = ModelConfig(hf_path=str(tiny[0]))
    assert config.build_scorer(seed=0, model=model).known == config.build(seed=0, model=model).known
    mixed: Task = Mixture.Config(tasks={"own": config}).build_scorer(seed=0, model=model)
    assert mixed.tasks["own"].known


def test_progress_is_reported_while_a_file_is_read_and_tokenised(tiny, tmp_path):
    path = write(tmp_path / "long.jsonl", *[problem(number) for number in range(10_000)])
    told = []
    with showing_progress(told.append):
        build(tiny, path=path)
    assert told[0] == f"read 10,000 lines of {path}"
    assert told[1:] == [
        f"tokenised {count:,} of 10,000 questions of {path}" for count in range(0, 10_000, 2_000)
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([problem(1), "\n", "{nope\n"], "line 3: not JSON"),
        ([problem(1), "[1]\n"], "line 2: not a JSON object"),
        ([{"question": "?"}], "line 1: field 'answer' is missing"),
        ([{"question": 5, "answer": "#### 5"}], "line 1: field 'question' is missing or not text"),
        (
            [problem(1), {"question": "?", "answer": "5"}],
            "line 2: field 'answer' does not end in '#### NUMBER'; add the number",
        ),
        ([problem(1), "[" * 100_000 + "\n"], "line 2: not JSON: maximum recursion depth exceeded"),
        (
            [{"question": "half \ud800", "answer": "#### 1"}],
            r"line 1: field 'question' has half of a surrogate pair",
        ),
        (["\n"], "is empty"),
        ([problem(1), problem(1)], "has 1 different question"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_line(tiny, tmp_path, lines, message):
    path = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(ConfigError, match=message) as error:
        build(tiny, path=path)
    assert str(error.value).startswith(f"task.path: {path}")


def test_bytes_that_are_not_text_are_refused(tiny, tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"question": "é", "answer": "#### 1"}\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match="line 1: not JSON"):
        build(tiny, path=str(path))


def test_prompts_too_long_are_refused_with_line_and_lengths(tiny, tmp_path):
    long = {"question": "How many? " * 80, "answer": "#### 1"}
    path = write(tmp_path / "long.jsonl", problem(1), long, problem(2), long)
    with pytest.raises(
        ConfigError,
        match=r"line 2: its prompt has \d+ tokens.*max_prompt_tokens=100 .*2 such lines",
    ):
        build(tiny, path=path, max_prompt_tokens=100)
    with pytest.raises(ConfigError, match=r"line 2: .*model.max_seq_len=128"):
        build(tiny, path=path, model=ModelConfig(hf_path=str(tiny[0]), max_seq_len=128))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"path": ""}, "task.path: not set"),
        ({"path": "/nowhere/x.jsonl"}, "task.path: there is no file '/nowhere/x.jsonl'"),
        ({"path": "/proc"}, "task.path: '/proc' cannot be read: Is a directory"),
        (
            {"path": "/proc/self/mem"},
            "task.path: '/proc/self/mem' cannot be read: Input/output error",
        ),
        ({"path": "/" + "x" * 300}, "cannot be read: File name too long"),
        ({"held_out_fraction": 1.0}, "task.held_out_fraction: 1.0; .* at least 0 and below 1"),
        ({"model": ModelConfig()}, "model.hf_path: not set"),
        (
            {"model": ModelConfig(hf_path="/nowhere")},
            "model.hf_path: there is no folder '/nowhere'",
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused(tiny, config, message):
    with pytest.raises(ConfigError, match=message):
        build(tiny, **config)


@pytest.mark.parametrize(
    ("name", "message"),
    [("tokenizer.json", "has no tokenizer.json"), ("chat_template.jinja", "no chat template")],
)
def test_a_model_folder_without_its_tokenizer_files_is_refused(tiny, tmp_path, name, message):
    folder = shutil.copytree(tiny[0], tmp_path / "model")
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"model.hf_path: .*{message}"):
        build(tiny, model=ModelConfig(hf_path=str(folder)))


def test_the_tiny_model_is_a_function_of_its_seed_and_one_we_train(make_tiny_model, tiny, tmp_path):
    model = tmp_path / "model"
    data = tmp_path / "problems.jsonl"
    make_tiny_model.main(["--model-dir", str(model), "--data", str(data), "--lines", "60"])
    assert data.read_bytes() == tiny[1].read_bytes()
    for file in tiny[0].iterdir():
        assert (model / file.name).read_bytes() == file.read_bytes(), file.name
    shape = shape_of(ModelConfig(hf_path=str(model)))
    assert (shape.tie_embeddings, shape.vocab_size % 8, shape.dtype) == (True, 0, "float32")


def test_no_question_is_held_out_if_none_is_asked_for(tiny, tmp_path):
    path = write(tmp_path / "one.jsonl", {"question": "1 + 1?", "answer": "#### 2"})
    task = build(tiny, path=path, held_out_fraction=0.0)
    assert (task.prompt(0).answer, task.eval_prompts(9)) == ("2", [])
