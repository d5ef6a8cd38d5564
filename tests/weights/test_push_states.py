"""State machine of the push over a network: bit for bit or refused, whatever stops."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl.errors import RunError
from rl.weights import packed
from tests.weights.network import (
    RANKS,
    MemoryPublisher,
    MemorySubscriber,
    change,
    copied,
    initial,
    same,
)

REPLICAS = 2
READERS = st.integers(0, REPLICAS * RANKS - 1)
STEPS = st.integers(0, 4)
SHARES = st.sampled_from([0.0, 0.01, 0.05, 0.5])


class Pushes(RuleBasedStateMachine):
    """Publishers and readers that stop at any step, are cancelled, die and restart."""

    @initialize(use_delta=st.booleans())
    def start(self, use_delta):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(packed, "BLOCK", 32)
        self.loop = asyncio.new_event_loop()
        self.options = {"delta": use_delta, "timeout_s": 0.0, "generators": REPLICAS}
        self.weights = initial()
        self.version = 0
        self.history = {}
        self.tasks = {}
        self.readers = {}
        self.publishers = []
        self.late = []
        self.restart_trainer()

    @rule()
    def restart_trainer(self):
        for key in list(self.tasks):
            self.cut_short(key)
        for publisher in self.publishers:
            publisher.close()
        self.publishers = [
            MemoryPublisher(self.weights, rank, **self.options) for rank in range(RANKS)
        ]
        for publisher in self.publishers:
            publisher.gates.closed = True
        for reader in range(REPLICAS * RANKS):
            self.respawn(reader)
        self.history = {self.version: copied(self.weights)}

    @rule(reader=READERS)
    def respawn(self, reader):
        self.cut_short(("fetch", reader))
        replica, rank = divmod(reader, RANKS)
        subscriber = MemorySubscriber(
            self.publishers, rank, replica=replica, delta=self.options["delta"]
        )
        subscriber.gates.closed = True
        self.readers[reader] = subscriber, None

    @rule(times=st.integers(1, 3), share=SHARES, seed=st.integers(0, 1000))
    def train_and_push(self, times, share, seed):
        for i in range(times):
            for rank in range(RANKS):
                self.to_the_end(("publish", rank))
            change(self.weights, share, seed + i)
            self.version += 1 + seed % 2
            self.history[self.version] = copied(self.weights)
            for rank in range(RANKS):
                self.begin(("publish", rank), self.publishers[rank].publish(self.version))
                self.to_the_end(("publish", rank))

    @rule(rank=st.integers(0, RANKS - 1), steps=STEPS)
    def publish_again(self, rank, steps):
        self.begin(("publish", rank), self.publishers[rank].publish(self.version))
        self.go_on(("publish", rank), steps)

    @rule(reader=READERS, age=st.integers(0, 1), steps=STEPS)
    def fetch_a_bit(self, reader, age, steps):
        version = sorted(self.history)[-1 - age % len(self.history)]
        self.begin(("fetch", reader), self.readers[reader][0].fetch(version))
        self.go_on(("fetch", reader), steps)

    @rule(reader=READERS, age=st.integers(0, 2))
    def pull(self, reader, age):
        subscriber, _ = self.readers[reader]
        version = sorted(self.history)[-1 - age % len(self.history)]
        try:
            self.readers[reader] = subscriber, subscriber.pull(version)
        except RunError:
            return
        assert self.readers[reader][1] == version

    @rule(reader=READERS)
    def finish_and_pull(self, reader):
        task = self.to_the_end(("fetch", reader))
        if task and not task.exception():
            subscriber, _ = self.readers[reader]
            self.readers[reader] = subscriber, subscriber.pull(subscriber._fetched)

    @rule(
        reader=READERS,
        steps=st.integers(0, 6),
        times=st.integers(0, 3),
        share=SHARES,
        rank=st.integers(0, RANKS - 1),
        more=st.integers(0, 4),
    )
    def fetch_and_pull_while_pushing(self, reader, steps, times, share, rank, more):
        """Run several whole pushes and begin another one within a fetch."""
        self.fetch_a_bit(reader, 0, steps)
        self.pull(reader, 1)
        self.train_and_push(times, share, steps)
        self.publish_again(rank, more)
        self.finish_and_pull(reader)

    @rule(reader=READERS, steps=st.integers(0, 6), share=SHARES)
    def fetch_again_after_one_was_cut_short(self, reader, steps, share):
        self.fetch_a_bit(reader, 0, steps)
        self.cut_short(("fetch", reader))
        self.train_and_push(1, share, steps)
        self.fetch_a_bit(reader, 0, 2)
        for write in self.late:
            write()
        self.late.clear()
        self.finish_and_pull(reader)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def stop_one(self, data):
        self.cut_short(data.draw(st.sampled_from(sorted(self.tasks))))

    @invariant()
    def parameters_are_those_of_one_version(self):
        for reader, (subscriber, version) in getattr(self, "readers", {}).items():
            if version is None:
                assert all(shard.tensor.isnan().all() for shard in subscriber.shards)
            else:
                assert same(subscriber.shards, self.history[version], reader % RANKS), (
                    f"{reader}: not {version}"
                )

    def teardown(self):
        if hasattr(self, "loop"):
            for key in list(self.tasks):
                self.cut_short(key)
            self.all_is_well_when_left_alone()
            for publisher in self.publishers:
                publisher.close()
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            self.patch.undo()

    def all_is_well_when_left_alone(self):
        for rank in range(RANKS):
            self.begin(("publish", rank), self.publishers[rank].publish(self.version))
            self.to_the_end(("publish", rank)).result()
        for reader, (subscriber, _) in self.readers.items():
            self.begin(("fetch", reader), subscriber.fetch(self.version))
            self.to_the_end(("fetch", reader)).result()
            self.readers[reader] = subscriber, subscriber.pull(self.version)
        self.parameters_are_those_of_one_version()

    def gates(self, key):
        kind, index = key
        return (self.publishers[index] if kind == "publish" else self.readers[index][0]).gates

    def begin(self, key, coroutine):
        if key in self.tasks:
            coroutine.close()
        else:
            self.tasks[key] = self.loop.create_task(coroutine)
            self.settle(key)

    def go_on(self, key, steps):
        while key in self.tasks and steps:
            self.gates(key).let_on()
            self.settle(key)
            steps -= 1

    def to_the_end(self, key):
        task = self.tasks.get(key)
        self.go_on(key, 1000)
        return task

    def settle(self, key):
        """Run until the task waits at a gate or is done; a refused fetch is done too."""
        task = self.tasks[key]
        gates = self.gates(key)

        async def still():
            at_gate = asyncio.create_task(gates.reached.wait())
            done, _ = await asyncio.wait(
                [task, at_gate], timeout=120, return_when=asyncio.FIRST_COMPLETED
            )
            assert done
            at_gate.cancel()

        self.loop.run_until_complete(still())
        if task.done():
            error = self.tasks.pop(key).exception()
            assert error is None or (key[0] == "fetch" and isinstance(error, RunError))

    def cut_short(self, key):
        """Cancel the task as a cancelled endpoint does: its threads and transfers continue."""
        task = self.tasks.pop(key, None)
        if task is None:
            return
        kind, index = key
        task.cancel()
        self.loop.run_until_complete(asyncio.wait([task], timeout=120))
        assert task.done()
        if kind == "publish":
            self.late_pack(index)
        else:
            self.late.append(self.readers[index][0].late)

    def late_pack(self, rank):
        self.gates(("publish", rank)).let_on()
        packed = self.publishers[rank]._packer.submit(int)
        self.loop.run_until_complete(
            asyncio.wait_for(asyncio.wrap_future(packed, loop=self.loop), 120)
        )


TestPushes = Pushes.TestCase
TestPushes.settings = settings(max_examples=20, stateful_step_count=20)


@pytest.mark.long
class TestManyPushes(Pushes.TestCase):
    settings = settings(max_examples=80, stateful_step_count=20)
