"""Sequences of an episode whose history may be rewritten."""

import dataclasses
import random

import numpy as np

from rl.types import Completion
from rl.types.routed_experts import RoutedExperts
from rl.types.sampling_mask import SamplingMask
from rl.types.sequences import SequenceLog


def completion(*tokens, version=0):
    logprobs = [-0.5 * token for token in tokens]
    versions = [version] * len(tokens)
    return Completion(tokens=[*tokens], logprobs=logprobs, versions=versions, finish_reason="stop")


def columns(log):
    return [(each.tokens, [int(s) for s in each.sampled]) for each in log.sequences]


def test_a_prompt_continues_the_longest_sequence_that_it_begins_with():
    log = SequenceLog()
    log.add([1, 2], completion(3, 4))
    log.add([1, 2, 3, 4, 5], completion(6, version=2))
    assert columns(log) == [([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])]
    sequence = log.sequences[0].snapshot()
    assert sequence.versions.tolist() == [-1, -1, 0, 0, -1, 2]
    assert sequence.logprobs.tolist() == [0, 0, -1.5, -2, 0, -3]


def test_answers_keep_their_sampling_masks():
    mask = SamplingMask.of_rows([np.array([2, 5, 6], dtype=np.int32)])
    log = SequenceLog()
    log.add([1, 2], completion(3, 4))
    log.add([1, 2, 3, 4, 5], dataclasses.replace(completion(6), sampling_mask=mask))
    log.add([9], completion(8))
    masked, free = (sequence.snapshot().sampling_mask for sequence in log.sequences)
    assert masked.sizes.tolist() == [0, 0, 0, 0, 0, 2]
    assert masked.ids(5).tolist() == [5, 6]
    assert free is None


def test_a_token_keeps_the_experts_of_the_first_answer_after_it():
    def with_experts(given, answer, name):
        """The completion with one expert in one layer, ``name``, except for the last token's."""
        ids = np.full((given + len(answer.tokens), 1, 1), name, dtype=np.uint8)
        ids[-1] = 255
        return dataclasses.replace(answer, experts=RoutedExperts(ids))

    log = SequenceLog()
    assert log.recorded([1, 2]) == 0
    log.add([1, 2], with_experts(2, completion(3, 4), 7))
    assert log.recorded([1, 2, 3, 4, 5]) == 3
    assert log.recorded([1, 2, 3]) == 0
    log.add([1, 2, 3, 4, 5], with_experts(5, completion(6, 6), 8))
    log.add([1, 2, 3, 4, 5], with_experts(5, completion(9), 9))
    log.add([1, 2, 3, 4, 5, 6, 6, 2], completion(3))
    log.add([8], completion(3))
    found = [each.snapshot().experts for each in log.sequences]
    assert found[0].ids.ravel().tolist() == [7] * 3 + [8] * 3 + [255] * 3
    assert found[0].known.tolist() == [True] * 6 + [False] * 3
    assert found[1].ids.ravel().tolist() == [9] * 5 + [255]
    assert found[2] is None


def test_the_longest_of_two_sequences_is_continued():
    log = SequenceLog()
    log.add([1, 2], completion(3))
    log.add([1], completion(2))
    log.add([1, 2, 3, 4], completion(5))
    assert columns(log) == [([1, 2, 3, 4, 5], [0, 0, 1, 0, 1]), ([1, 2], [0, 1])]


def test_another_prompt_begins_a_sequence_in_which_no_shared_token_is_sampled():
    log = SequenceLog()
    log.add([1, 2], completion(3, 4))
    log.add([1, 2, 3, 4, 5], completion(6))
    log.add([1, 2, 3, 4, 5], completion(7))  # the same prompt again
    log.add([9, 3, 4], completion(3))  # a rewritten history
    assert columns(log)[1:] == [
        ([1, 2, 3, 4, 5, 7], [0, 0, 0, 0, 0, 1]),
        ([9, 3, 4, 3], [0, 0, 0, 1]),
    ]


def test_conversations_by_turns_are_one_sequence_each():
    log = SequenceLog()
    for turn in range(4):
        for each in (1, 2):
            before = next((s.tokens for s in log.sequences if s.tokens[0] == each), [])
            log.add([*before, each, turn], completion(10 * each + turn))
    assert [sequence.tokens[0] for sequence in log.sequences] == [1, 2]
    assert [sum(sequence.sampled) for sequence in log.sequences] == [4, 4]


def test_every_answer_of_a_random_tree_of_prompts_is_sampled_in_one_sequence():
    rng = random.Random(0)
    for _ in range(50):
        log = SequenceLog()
        histories = [[]]
        answers = []
        for _ in range(20):
            prompt = [*rng.choice(histories), *rng.choices(range(3), k=rng.randint(1, 3))]
            answer = rng.choices(range(3), k=rng.randint(1, 3))
            log.add(prompt, completion(*answer))
            histories.append(prompt + answer)
            answers.append((prompt, answer))
        assert sum(sum(s.sampled) for s in log.sequences) == sum(len(each) for _, each in answers)
        for prompt, answer in answers:
            end = len(prompt) + len(answer)
            own = [s for s in log.sequences if s.tokens[:end] == prompt + answer]
            assert any(all(s.sampled[len(prompt) : end]) for s in own)
