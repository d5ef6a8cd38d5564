"""What a checkpoint holds of the controller comes back as it was."""

import json
from dataclasses import asdict

from rl.controller.state import RunState
from rl.types import Completion, Prompt, Rollout


def state() -> RunState:
    """After step 3, with two groups of two sampled for step 4."""
    ahead = [
        [
            Rollout(
                prompt=Prompt(ordinal=ordinal, tokens=[4, 9, 5], text="copy 3 =", answer="3"),
                sample=sample,
                completion=Completion(
                    tokens=[9, 2], logprobs=[-0.1 / 3, -1e-30], versions=[2, 3], finish_reason="stop"
                ),
                text="3",
                reward=1 / 3,
                metrics={"exact": 1.0, "length": 0.1 + 0.2},
            )
            for sample in range(2)
        ]
        for ordinal in (8, 9)
    ]
    return RunState(step=3, next_ordinal=10, ahead=ahead)


def test_a_state_comes_back_from_json_bit_for_bit():
    again = RunState.from_dict(json.loads(json.dumps(state().to_dict())))
    assert again == state()
    assert isinstance(again.ahead[1][0].prompt, Prompt)
    assert isinstance(again.ahead[1][0].completion, Completion)


def test_a_fresh_run_and_a_checkpoint_of_lockstep_hold_nothing_ahead():
    assert RunState.from_dict({}) == RunState()
    assert RunState.from_dict({"step": 4, "next_ordinal": 16}) == RunState(step=4, next_ordinal=16)


def test_forgetting_what_is_ahead_puts_its_prompts_again():
    forgotten = state()
    forgotten.forget_ahead()
    assert asdict(forgotten) == {"step": 3, "next_ordinal": 8, "ahead": []}
