"""Configs of benchmarks, on files in the form of the published ones."""

import json

import pytest

from rl.cli.arguments import find_config
from rl.errors import ConfigError
from rl.rollout.prompts import eval_prompts
from rl.trainers.trial import build_task, try_task
from rl.types import Completion
from tests.kit.tables import check_rows
from tests.tasks.test_multiple_choice import GPQA
from tests.tasks.test_python_puzzles import HUMAN_EVAL

FILES = {
    "gsm8k_test": ({"question": "q", "answer": "2 * 21\n#### 42"}, "#### 42"),
    "math_500": ({"problem": "q", "solution": r"\boxed{x(x+1)}"}, r"So \boxed{x^2 + x}."),
    "aime_2024": ({"problem": "q", "solution": "", "answer": "204"}, r"\boxed{204}"),
    "gpqa_diamond": (GPQA, None),
    "ifeval": (
        {"prompt": "q", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        "None at all.",
    ),
    "humaneval": (HUMAN_EVAL, f"```python\n{HUMAN_EVAL['canonical_solution']}\n```"),
}


@pytest.fixture
def config_of(model, tmp_path):
    """Function that returns a config whose tasks read files."""

    def config(name):
        config = find_config(name)()
        config.model.hf_path = model.hf_path
        config.model.max_seq_len = 2048
        config.rollout.max_tokens = 64
        tasks = {name: config.task} if name in FILES else config.task.tasks
        for own, task in tasks.items():
            path = tmp_path / f"{own}.jsonl"
            path.write_text(f"{json.dumps(FILES[own][0])}\n" * 2)
            task.path, task.split, task.dataset_config = str(path), "", ""
        return config

    return config


def test_all_questions_are_for_evaluation_and_right_answers_count(config_of):
    def check(name):
        config = config_of(name)
        task = build_task(config)
        first, second = eval_prompts(task, config.evaluation.prompts)
        said = FILES[name][1] or f"Answer: {first.answer}"
        assert task.score(second, said, Completion.written([1])).correct
        assert not task.score(second, "I do not know, so none.", Completion.written([1])).correct
        try_task(config, task, trains=False)
        with pytest.raises(ConfigError, match=r"held_out_fraction: 1 leaves nothing to train on"):
            try_task(config, task)

    check_rows(FILES, check)


def test_all_benchmarks_are_evaluated_together(config_of):
    config = config_of("benchmarks")
    prompts = eval_prompts(build_task(config), config.evaluation.prompts)
    assert sorted(prompt.task for prompt in prompts) == sorted([*FILES, *FILES])
