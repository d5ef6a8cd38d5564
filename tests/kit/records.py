"""Records of runs: metrics, and rollouts of several turns, sequences and tasks."""

import math

import numpy as np

from rl.metrics import Value
from rl.observe.rollout_files import Chunk
from rl.types import Completion, Prompt, Rollout, Sequence
from rl.types.routed_experts import RoutedExperts
from rl.types.sampling_mask import SamplingMask


def sequence(given: int, sampled: int) -> Sequence:
    """Return a sequence; from three sampled tokens on with a sampling mask and experts."""
    ids = [np.array([n, *range(n)], dtype=np.int32) for n in range(sampled)]
    kind = np.uint8 if sampled % 2 else np.uint16
    experts = np.arange((given + sampled) * 6, dtype=kind).reshape(-1, 3, 2)
    completion = Completion(
        tokens=[2**31 - 1 - i for i in range(sampled)],
        logprobs=[-math.pi / (i + 1) for i in range(sampled)],
        versions=[7 + i for i in range(sampled)],
        finish_reason="stop",
        sampling_mask=SamplingMask.of_rows(ids) if sampled > 2 else None,
        experts=RoutedExperts(experts) if sampled > 2 else None,
    )
    return Sequence.of([4] * given, completion)


def rollout(prompt_id: int, sample: int, *lengths: tuple[int, int]) -> Rollout:
    """Return a rollout of one sequence for each of ``lengths``, of given and sampled tokens."""
    prompt = Prompt(
        prompt_id=prompt_id, tokens=[4] * prompt_id, text="q\n", answer="é\u2028", task="sums"
    )
    return Rollout(
        prompt=prompt,
        sample=sample,
        sequences=tuple(sequence(*each) for each in lengths),
        text="<script>\x00",
        stop_reason="turns",
        reward=1 / 3,
        metrics={"correct": 0.1, "odd": math.inf, "calls": Value.of(0.3, "std", 2.0)},
        turn_rewards=(0.1, 0.2),
        turn_lengths=(1, 2),
        turn_order=(1, 0),
        players=(1, 0, 2)[: len(lengths)],
        cut_turns=1,
    )


def chunk(*rollouts: Rollout) -> Chunk:
    tokens = sum(len(each) for one in rollouts for each in one.sequences)
    values = np.arange(tokens, dtype=np.float32)
    return Chunk(
        rollouts=[*rollouts], columns={"advantages": values / 3, "trainer_logprobs": -values}
    )


def two_chunks() -> list[Chunk]:
    return [
        chunk(rollout(9, 0, (2, 3)), rollout(9, 1, (2, 1), (5, 2))),
        chunk(rollout(2, 0, (1, 4), (3, 3), (2, 2))),
    ]


def make_rows(count: int) -> list[dict]:
    """Return the metrics of a run whose reward climbs from 0 to 1."""
    return [
        {
            "step": step,
            "reward/mean": (step - 1) / max(count - 1, 1),
            "reward/correct": 0.5,
            "entropy/mean": 1.0 / step,
            "trainer/grad_norm": 0.3,
            "tokens_per_s": 1234.0,
            "timing/generate": 1.0,
            "timing/train": 0.6,
            "timing/push": 0.004,
            "timing/step": 2.0,
        }
        for step in range(1, count + 1)
    ]
