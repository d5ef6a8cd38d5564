"""Examples as batches, which a session trains on."""

import pytest
import torch

import rl
from rl.algorithms.batch import whole_texts
from rl.algorithms.sequence_losses import BradleyTerryLoss
from rl.algorithms.sequence_scores import score_batch
from rl.data.batches import batch_of, batch_of_pairs
from rl.data.conversations import ConversationsConfig, read_conversations
from rl.data.examples import EncodingConfig
from rl.data.preferences import read_preferences
from rl.types import Completion, Prompt, Rollout
from rl.types.deadlines import DeadlineConfig
from tests.kit.conversations import said, user


def examples(dialect, *lengths: int):
    rows = [{"messages": [user("a"), said("b " * length)]} for length in lengths]
    return read_conversations(rows, dialect, ConversationsConfig())


def test_a_batch_holds_the_examples_end_to_end(dialect):
    items = examples(dialect, 1, 5, 2)
    batch = batch_of(items.items)
    assert batch.tokens.dtype == batch.lengths.dtype == torch.int64
    assert batch.lengths.tolist() == [len(example) for example in items]
    assert batch.tokens.tolist() == [t for example in items for t in example.tokens.tolist()]
    assert batch.loss_weights.tolist() == [
        float(t) for example in items for t in example.trained.tolist()
    ]
    first = batch.lengths.cumsum(0) - batch.lengths
    assert not batch.loss_weights[first].any()


def test_weights_are_those_of_the_reduction(dialect):
    items = examples(dialect, 1, 5)
    by_example = batch_of(items.items, reduction="sequence_mean").loss_weights
    sums = [part.sum().item() for part in by_example.split([len(each) for each in items])]
    assert sums == pytest.approx([1.0, 1.0])
    fixed = batch_of(items.items, reduction="fixed_length", max_tokens=50).loss_weights
    assert sorted(set(fixed.tolist())) == pytest.approx([0.0, 1 / 50])


def test_a_batch_of_pairs_has_chosen_and_rejected_in_turn(dialect):
    rows = [{"prompt": "a", "chosen": f"b{n}", "rejected": f"c{n}"} for n in range(3)]
    pairs = read_preferences(rows, dialect, EncodingConfig())
    batch = batch_of_pairs(pairs)
    assert len(batch) == 6
    rejected = batch.select([3])
    assert rejected.tokens.tolist() == pairs[1].rejected.tokens.tolist()
    assert rejected.loss_mask.tolist() == pairs[1].rejected.trained.tolist()


@pytest.mark.long
def test_a_session_trains_on_a_batch(dialect):
    batch = batch_of(examples(dialect, 1, 6, 3).items)
    config = rl.SessionConfig(
        model=rl.ModelConfig(vocab_size=512, max_seq_len=64),
        generator=None,
        deadlines=DeadlineConfig(heartbeat=10.0),
    )
    loss = rl.losses.CrossEntropyLoss.Config()
    means = []
    with rl.Session(config).blocking() as session:
        for _ in range(3):
            outputs, metrics = session.forward_backward(batch, loss)
            mean = -outputs["logprobs"][batch.loss_mask].mean().item()
            assert metrics["loss/mean"] == pytest.approx(mean, rel=1e-5)
            step = session.optim_step(lr=1e-2)
            assert step["trainer/weight"] == batch.loss_mask.sum().item()
            means.append(mean)
    assert means[0] > means[1] > means[2]


def test_a_reward_model_scores_a_conversation_where_a_role_scores_a_rollout(dialect):
    """Both read the value after the stop token, not after the newline of the chat template."""
    asked = user("1?")
    row = {"prompt": [asked], "chosen": [said("2")], "rejected": "3"}
    config = EncodingConfig(enable_thinking=False)
    (pair,) = read_preferences([row], dialect, config)
    trained = score_batch(batch_of_pairs([pair]), BradleyTerryLoss.Config().build())
    prompt = dialect.render([asked], add_generation_prompt=True, enable_thinking=False).tokens
    rollouts = []
    for text in ("2", "3"):
        completion = Completion.written([*dialect.encode(text), dialect.stop_token_ids[0]])
        shown = Prompt(prompt_id=0, tokens=prompt.tolist(), text="", answer="")
        rollouts.append(
            Rollout.single_turn(shown, completion, sample=0, text="", reward=0.0, metrics={})
        )
    sampled, ends = whole_texts(rollouts)
    assert trained.tokens.tolist() == sampled.tokens.tolist()
    assert trained.lengths.tolist() == sampled.lengths.tolist()
    assert trained.loss_mask.nonzero().flatten().tolist() == ends.tolist()
    assert set(sampled.tokens[ends - 1].tolist()) == {dialect.stop_token_ids[0]}
