import pytest

from rl.model.shape import ModelConfig
from rl.types import Completion, Prompt, Rollout


@pytest.fixture(scope="session")
def model(tiny_model) -> ModelConfig:
    return ModelConfig(hf_path=str(tiny_model), max_seq_len=8000)


@pytest.fixture
def rollout():
    """Return a function that makes a rollout: ``rollout([1, 2], [7, 8, 9], reward=0.5)``. The
    log-prob of token t is -t; versions count up from 3.
    """

    def make(
        prompt, tokens, *, reward=0.0, sample=0, finish_reason="stop", task="", **metrics
    ) -> Rollout:
        completion = Completion(
            tokens=tokens,
            logprobs=[-float(token) for token in tokens],
            versions=list(range(3, 3 + len(tokens))),
            finish_reason=finish_reason,
        )
        question = Prompt(prompt_id=0, tokens=prompt, text="", answer="", task=task)
        return Rollout.single_turn(
            question,
            completion,
            sample=sample,
            text="",
            reward=reward,
            metrics={"correct": 0.0, **metrics},
        )

    return make
