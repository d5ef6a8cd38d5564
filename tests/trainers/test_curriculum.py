"""Prompts are chosen by their recent success, by published rules, and the same after a resume."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rl.config.rollout import CurriculumConfig
from rl.errors import ConfigError
from rl.trainers.curriculum import Curriculum
from rl.types import Completion, Prompt, Rollout
from tests.trainers.loops import EACH_PIPELINE, results, trained

RATES = [0.0, 0.25, 0.5, 1.0, None]
"""Success of the prompts of the pool; the last one was not asked yet."""


PROMPT = Prompt(prompt_id=0, tokens=[1], text="", answer="")


def group(share):
    """Return a group of four rollouts, of which a share is correct."""
    said = Completion.written([2])
    return [
        Rollout.single_turn(
            PROMPT, said, sample=i, text="", reward=0.0, metrics={"correct": float(i < 4 * share)}
        )
        for i in range(4)
    ]


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        ({"floor": 0.0}, [1.0, 0.75, 0.5, 0.0, 1.0]),
        ({"rule": "variance", "floor": 0.0}, [0.0, 0.1875, 0.25, 0.0, 0.25]),
        ({"rule": "variance", "floor": 0.2}, [0.05, 0.1875, 0.25, 0.05, 0.25]),
        ({"skip_solved": 1, "skip_unsolved": 1, "floor": 0.1}, [0.0, 0.75, 0.5, 0.0, 1.0]),
    ],
)
def test_prompts_are_drawn_with_the_weights_of_the_rule(fields, weights):
    curriculum = Curriculum(CurriculumConfig(prompts=5, **fields), seed=3)
    for place, rate in enumerate(RATES[:-1]):
        curriculum.note(place, group(rate))
    count = 4000
    drawn = Counter(curriculum.draw(prompt_id) for prompt_id in range(count))
    for place, weight in enumerate(weights):
        share = weight / sum(weights)
        assert drawn[place] / count == pytest.approx(share, abs=4 * (share / count) ** 0.5)


@pytest.mark.parametrize("rule", ["failure", "variance"])
def test_a_draw_is_that_of_a_curriculum_which_went_back_to_the_same_success(rule):
    config = CurriculumConfig(prompts=9, rule=rule, floor=0.1, skip_solved=2, skip_unsolved=2)
    curriculum = Curriculum(config, seed=5)
    noted = np.random.default_rng(0).integers((9, 5), size=(400, 2)).tolist()
    noted += [[place, 4] for place in [*range(9)] * 2]  # then all are solved
    drawn = []
    for prompt_id, (place, correct) in enumerate(noted):
        again = Curriculum(config, seed=5)
        again.restore(curriculum.to_dict())
        drawn.append(curriculum.draw(prompt_id))
        assert again.draw(prompt_id) == drawn[-1]
        curriculum.note(place, group(correct / 4))
    assert {*drawn} == {*range(9)}
    assert curriculum.metrics()["curriculum/solved"] == 9


def test_success_is_recent_and_a_prompt_is_skipped_after_groups_in_a_row():
    config = CurriculumConfig(prompts=2, memory=0.75, skip_solved=2, skip_unsolved=3)
    curriculum = Curriculum(config, seed=0)
    for share in (0.5, 0.0, 1.0, 1.0):
        curriculum.note(1, group(share))
        (row,) = curriculum.to_dict()
    rate = 0.75 * (0.75 * (0.75 * 0.5 + 0.25 * 0.0) + 0.25) + 0.25
    assert row == [1, pytest.approx(rate), 2, 0]
    found = {name.partition("/")[2]: value for name, value in curriculum.metrics().items()}
    assert found == {"seen": 1.0, "solved": 1.0, "unsolved": 0.0}
    assert {curriculum.draw(number) for number in range(50)} == {0}
    for _ in range(3):
        curriculum.note(0, group(0.0))
    assert curriculum.metrics()["curriculum/unsolved"] == 1.0
    assert {curriculum.draw(number) for number in range(50)} == {0, 1}  # none is left: all again
    again = Curriculum(config, seed=0)
    again.restore(json.loads(json.dumps(curriculum.to_dict())))
    assert again.to_dict() == curriculum.to_dict()


def test_rollouts_without_a_reward_are_no_failures():
    curriculum = Curriculum(CurriculumConfig(prompts=1), seed=0)
    curriculum.note(0, [replace(each, reward=float("nan")) for each in group(0.0)])
    assert curriculum.to_dict() == []


FIELDS = {
    "rollout.curriculum.prompts": 6,
    "rollout.curriculum.skip_solved": 1,
    "rollout.prompts_per_step": 4,
}


def even(run):
    """Return a function that has prompts be solved whose digits begin with an even one."""
    asked = []

    def prepare(trainer, *_):
        score = run.rewards.score

        async def scored(prompt, said):
            asked.append((prompt.prompt_id, prompt.answer))
            right = {"correct": float(int(prompt.answer[0]) % 2 == 0)}
            return [replace(each, metrics=right) for each in await score(prompt, said)]

        run.rewards.score = scored

    return prepare, asked


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_same_prompts_are_asked_after_a_resume(run, staleness):
    prepare, asked = even(run)
    run(prepare, steps=6, staleness=staleness, save_every=1, fields=FIELDS)
    whole = results(run.record)
    rows = whole[0]
    assert len({text for _, text in asked}) == rows[-1]["curriculum/seen"] <= 6
    assert 0 < rows[-1]["curriculum/solved"] < 6
    assert rows[-1]["curriculum/unsolved"] == 0
    saved = {3: run.saved[3]}
    prepare, again = even(run)
    run(prepare, steps=6, staleness=staleness, save_every=1, saved=saved, fields=FIELDS)
    assert results(run.record) == whole
    assert again and {*again} <= {*asked}


@EACH_PIPELINE
def test_each_prompt_id_is_trained_once_whatever_prompt_it_stands_for(run, pipeline):
    prepare, asked = even(run)
    run(prepare, steps=5, staleness=1, pipeline=pipeline, fields=FIELDS)
    assert trained(run.record) == [*range(20)]
    repeated = Counter(text for _, text in asked)
    unsolved = [text for text in repeated if int(text[0]) % 2]
    assert sum(repeated[text] for text in unsolved) > len(asked) / 2


def test_fields_that_cannot_act_are_refused(run):
    said = "rollout.curriculum.floor is 0.1; it must be 0.05 unless rollout.curriculum.prompts is a"
    with pytest.raises(ConfigError, match=said):
        run.make(fields={"rollout.curriculum.floor": 0.1})
