import json
import re

import pytest

from rl.data.jsonl import showing_progress
from rl.errors import ConfigError
from rl.model.shape import ModelConfig
from rl.tasks.reasoning_gym import ReasoningGym
from rl.types import Completion
from tests.kit.packages import reasoning_gym_folder

SILENT = Completion.written([])


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    folder = str(reasoning_gym_folder())
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder)  # of the process that makes items again


def build(tiny, only_scores=False, seed=0, **config):
    config = {"dataset": "chain_sum", "items": 20, "max_prompt_tokens": 400, **config}
    model = ModelConfig(hf_path=str(tiny[0]))
    options = {"only_scores": True} if only_scores else {}
    return ReasoningGym.Config(**config).build(seed=seed, model=model, **options)


def scored(task, prompt, text):
    score = task.score(prompt, text, SILENT)
    return score.reward, score.correct, score.metrics


def sum_in(text):
    """Return the sum that the text asks for, such as ``4 + 12 - 3``."""
    return re.search(r"-?\d+(?: [+-] -?\d+)+", text)[0]


def test_items_are_asked_in_the_chat_template_and_their_answers_are_right(tiny):
    task = build(tiny, instruction="Write <answer> N </answer>.")
    assert len(task.train) == 18
    assert len(task.held_out) == 2
    for prompt in [*map(task.prompt, range(18)), *task.eval_prompts(9)]:
        assert prompt.text.count("<|im_start|>user\n") == 1
        assert "\nWrite <answer> N </answer>.<|im_end|>" in prompt.text
        answer = json.loads(prompt.answer)["answer"]
        assert eval(sum_in(prompt.text)) == int(answer)
        full = {"answered": 1.0, "scorer_failed": 0.0}
        right = f"<answer>1</answer> no, <answer> {answer} </answer>"
        assert scored(task, prompt, right) == (1.0, True, full)
        assert scored(task, prompt, "<answer>x</answer>") == (0.0, False, full)
        assert scored(task, prompt, answer) == (0.0, False, full | {"answered": 0.0})


def test_a_scorer_without_prompts_gives_the_same_scores(tiny):
    prompt = build(tiny).prompt(3)
    told = []
    with showing_progress(told.append):
        scorer = build(tiny, only_scores=True)
    assert told == []
    answer = json.loads(prompt.answer)["answer"]
    assert scored(scorer, prompt, f"<answer>{answer}</answer>")[:2] == (1.0, True)


def test_items_have_the_options_of_the_dataset_and_each_question_one_answer(tiny):
    few = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
    task = build(tiny, options=few, items=400)
    assert len(sum_in(task.prompt(0).text).split()) == 2 + 1
    answers = {}
    for prompt in map(task.prompt, range(len(task.train))):
        answers.setdefault(prompt.text, set()).add(prompt.answer)
    assert len(answers) < len(task.train)
    assert all(len(each) == 1 for each in answers.values())


def test_a_scorer_that_raises_gives_no_reward(tiny):
    task = build(tiny, dataset="prime_factorization")
    failed = {"answered": 1.0, "scorer_failed": 1.0}
    assert scored(task, task.prompt(0), "<answer>no idea</answer>") == (0.0, False, failed)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"dataset": "chain_sums"}, "has no dataset 'chain_sums'; did you mean chain_sum"),
        ({"options": "{"}, "task.options: '{' is not JSON"),
        ({"options": "[]"}, "must be a JSON object without 'size' and 'seed'"),
        ({"options": '{"size": 3}'}, "task.items is the size"),
        ({"options": '{"terms": 3}'}, "task.options: .* refused by the dataset .*'terms'"),
        ({"options": '{"min_terms": 0}'}, "task.options: .* refused by the dataset"),
        ({"max_prompt_tokens": 9}, "task.dataset: chain_sum item 0: its prompt has"),
    ],
)
def test_a_config_that_cannot_work_is_refused(tiny, config, words):
    with pytest.raises(ConfigError, match=words):
        build(tiny, **config)


@pytest.mark.parametrize(
    "dataset", ["isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"]
)
def test_a_dataset_that_depends_on_the_process_is_refused(tiny, dataset):
    with pytest.raises(ConfigError, match=f"item .* of {dataset} is another one in another"):
        build(tiny, dataset=dataset, max_prompt_tokens=10_000)
