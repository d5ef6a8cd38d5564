"""State machine of the shared-memory push: no interleaving of processes tears a version."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from rl.errors import RunError
from rl.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from tests.weights.test_shared_memory import SHAPE, moved, rows

HASTY = moved(torch.float32, timeout_s=0.0)


class Protocol(RuleBasedStateMachine):
    """All interleavings of two writers and two readers, one copied row at a time, with deaths at
    any point.

    Version v fills all rows with v. The death of a process is modelled by the drop of its locks.
    """

    @initialize()
    def start(self):
        self.version = [0, 0]
        self.start_trainer()

    def start_trainer(self):
        """Start both ranks with two published versions, and readers that hold nothing."""
        self.writers = [
            SharedMemoryPublisher(
                [rows(torch.zeros(SHAPE), 3 * rank, 3 * rank + 3)], HASTY, rank=rank
            )
            for rank in (0, 1)
        ]
        self.writing: list = [None, None]
        self.dead = False
        for _ in range(2):
            self.version = [max(self.version) + 1] * 2
            for writer in self.writers:
                writer._tensors[0].fill_(self.version[0])
                writer.write(self.version[0])
        self.readers = [self.fresh_reader(number) for number in (0, 1)]
        self.reading: list = [None, None]

    def fresh_reader(self, number: int) -> tuple[SharedMemorySubscriber, torch.Tensor]:
        pulled = torch.zeros(SHAPE)
        segments = [writer.address for writer in self.writers]
        return SharedMemorySubscriber(segments, [rows(pulled, 1, 5)], HASTY, rank=number), pulled

    @rule(rank=st.sampled_from([0, 1]))
    def step_of_a_writer(self, rank):
        """Begin the next version unless the other rank is behind, write one row, or finish."""
        if self.dead:
            return
        if self.writing[rank] is not None:
            context, slot, left = self.writing[rank]
            if left:
                slot.views[0][left.pop()] = self.version[rank]
                return
            slot.version = self.version[rank]
            context.__exit__(None, None, None)
            self.writing[rank] = None
        elif self.version[rank] == min(self.version):
            context = self.writers[rank]._claimed(self.version[rank] + 1)
            try:
                slot = context.__enter__()
            except RunError:
                assert self.reading != [None, None], "a writer waits although no reader copies"
                return
            self.version[rank] += 1
            self.writing[rank] = (context, slot, [0, 1, 2])

    @rule(number=st.sampled_from([0, 1]), ago=st.integers(0, 2))
    def step_of_a_reader(self, number, ago):
        """Begin to pull one of the last versions, copy a route of it, or finish."""
        subscriber, pulled = self.readers[number]
        if self.reading[number] is None:
            version = max(self.version) - ago
            if claimed := subscriber.claim(version):
                copies = [pair for slot in claimed for pair in subscriber._copies[slot]]
                self.reading[number] = (version, claimed, copies)
            return
        version, claimed, copies = self.reading[number]
        if copies:
            destination, source = copies.pop()
            destination.copy_(source)
        else:
            subscriber.release(claimed)
            self.reading[number] = None
            assert (pulled[1:5] == version).all(), (
                f"torn: {pulled[1:5].tolist()} is not version {version}"
            )

    @rule(number=st.sampled_from([0, 1]), chance=st.integers(0, 9))
    def death_of_a_reader(self, number, chance):
        if chance == 0 and not self.dead:
            self.end_reader(number)
            self.readers[number] = self.fresh_reader(number)
            self.reading[number] = None

    @rule(chance=st.integers(0, 19))
    def death_of_the_trainer(self, chance):
        """End all ranks together; the readers keep their mappings."""
        if chance == 0:
            self.end_writers()

    @rule()
    def next_trainer(self):
        if self.dead:
            self.end_all()
            self.start_trainer()

    def end_reader(self, number: int):
        if self.reading[number] is not None:
            self.readers[number][0].release(self.reading[number][1])
        self.readers[number][0].close()

    def end_all(self):
        for number in (0, 1):
            self.end_reader(number)
        self.end_writers()

    def end_writers(self):
        for rank, writer in enumerate(self.writers):
            if self.writing[rank] is not None:
                self.writing[rank][0].__exit__(None, None, None)
            if not self.dead:
                writer.close()
        self.writing = [None, None]
        self.dead = True

    def teardown(self):
        if hasattr(self, "writers"):
            self.end_all()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=25, stateful_step_count=60)


@pytest.mark.long
class TestProtocolOften(Protocol.TestCase):
    settings = settings(max_examples=100, stateful_step_count=60)
