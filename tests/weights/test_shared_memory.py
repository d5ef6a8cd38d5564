"""The protocol of the push: whole versions or an error, and no slot reused under a reader."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from rl.errors import RunError
from rl.model.parts import Box, Part, Region
from rl.weights.shared_memory import Publisher, Subscriber

SHAPE = (6, 4)


def rows(tensor: torch.Tensor, start: int, stop: int) -> Part:
    return Part(Region("w", SHAPE, Box((start, 0), (stop - start, SHAPE[1]))), tensor[start:stop])


@pytest.fixture
def pair():
    """Two trainer ranks with three rows each, one reader that wants rows 2 to 4 in bfloat16."""
    trained = torch.randn(SHAPE)
    publishers = [Publisher([rows(trained, s, s + 3)], torch.bfloat16, readers=1) for s in (0, 3)]
    pulled = torch.zeros(SHAPE, dtype=torch.bfloat16)
    subscriber = Subscriber([p.segment for p in publishers], [rows(pulled, 2, 5)], reader=0)
    return trained, publishers, pulled, subscriber


def publish(publishers: list[Publisher], version: int, timeout: float = 5.0) -> None:
    for publisher in publishers:
        publisher.publish(version, timeout=timeout)


def test_each_version_arrives_cast_and_whole(pair):
    trained, publishers, pulled, subscriber = pair
    for version in range(5):
        trained.add_(1.0)
        publish(publishers, version)
        subscriber.pull(version)
        assert torch.equal(pulled[2:5], trained[2:5].to(torch.bfloat16))
    assert not pulled[:2].any()


def test_what_the_optimizer_does_after_publish_is_not_seen(pair):
    trained, publishers, pulled, subscriber = pair
    publish(publishers, 0)
    expected = trained[2:5].to(torch.bfloat16)
    trained.zero_()
    subscriber.pull(0)
    assert torch.equal(pulled[2:5], expected)


def test_a_version_that_is_not_there_whole_is_refused(pair):
    _, publishers, _, subscriber = pair
    with pytest.raises(RunError, match="pull of version 0: before the copy, the slot of trainer rank 0 holds nothing"):
        subscriber.pull(0)
    publishers[0].publish(0)
    with pytest.raises(RunError, match="the slot of trainer rank 1 holds nothing"):
        subscriber.pull(0)
    publishers[1].publish(0)
    publishers[1]._header[0] = 2 * 0 + 1  # as in the middle of a write
    with pytest.raises(RunError, match="the slot of trainer rank 1 is being written"):
        subscriber.pull(0)


def test_a_copy_during_which_the_slot_changed_is_refused(pair):
    _, publishers, _, subscriber = pair
    publish(publishers, 0)

    class Overwriting(list):
        def __iter__(self):
            publishers[0]._header[0] = 2 * 2 + 1  # the writer starts version 2 in the same slot
            return super().__iter__()

    subscriber._copies[0] = Overwriting(subscriber._copies[0])
    with pytest.raises(RunError, match="during the copy, the slot of trainer rank 0 is being written"):
        subscriber.pull(0)


def test_a_slot_is_not_reused_before_its_version_was_pulled(pair):
    trained, publishers, pulled, subscriber = pair
    publish(publishers, 0)
    publish(publishers, 1)
    with pytest.raises(RunError, match=r"publish of version 2: generator ranks \[0\] did not pull 0"):
        publishers[0].publish(2, timeout=0.05)
    subscriber.pull(1)
    publish(publishers, 2)
    subscriber.pull(2)
    assert torch.equal(pulled[2:5], trained[2:5].to(torch.bfloat16))


def test_a_generator_in_another_dtype_is_refused(pair):
    _, publishers, _, _ = pair
    with pytest.raises(RunError, match=r"w is torch.float32 in the generator and pushed as torch.bfloat16"):
        Subscriber([p.segment for p in publishers], [rows(torch.zeros(SHAPE), 0, 6)], reader=0)


def test_another_process_reads_it_and_nothing_is_left_by_name(pair, tmp_path):
    trained, publishers, _, _ = pair
    before = set(os.listdir("/dev/shm"))
    publish(publishers, 0)
    torch.save([p.segment for p in publishers], tmp_path / "segments.pt")
    reader = textwrap.dedent(
        """
        import sys, torch
        from tests.weights.test_shared_memory import SHAPE, rows, Subscriber
        pulled = torch.zeros(SHAPE, dtype=torch.bfloat16)
        segments = torch.load(sys.argv[1], weights_only=False)
        Subscriber(segments, [rows(pulled, 0, 6)], reader=0).pull(0)
        torch.save(pulled, sys.argv[2])
        """
    )
    script = [sys.executable, "-c", reader, str(tmp_path / "segments.pt"), str(tmp_path / "pulled.pt")]
    subprocess.run(script, check=True, timeout=120)
    assert torch.equal(torch.load(tmp_path / "pulled.pt"), trained.to(torch.bfloat16))
    assert set(os.listdir("/dev/shm")) == before
