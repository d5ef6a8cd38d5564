"""The ledger, driven through random interleavings of all that a run does to it."""

import json
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl.errors import RunError
from rl.trainers.ledger import Group, Ledger
from rl.types import Completion, Prompt, Rollout


def group_of(prompt_id: int, *versions: int) -> Group:
    prompt = Prompt(prompt_id=prompt_id, tokens=[4, 9, 5], text="copy 3 =", answer="3")
    completion = Completion(
        tokens=[9] * len(versions),
        logprobs=[-0.1 / 3] * len(versions),
        versions=[*versions],
        finish_reason="stop",
    )
    options = {"text": "3", "reward": 1 / 3, "metrics": {"correct": 0.1}}
    return [Rollout.single_turn(prompt, completion, sample=0, **options)]


def prompt_ids(groups: list[Group]) -> list[int]:
    return [group[0].prompt.prompt_id for group in groups]


class Run(RuleBasedStateMachine):
    """A trainer at ``version`` and generators that hold ``held``, which follows later."""

    GROUPS: ClassVar[list[int]] = [1, 2, 3, 5]

    @initialize(
        size=st.sampled_from(GROUPS), staleness=st.integers(0, 3), updates=st.integers(1, 3)
    )
    def begin(self, size, staleness, updates):
        self.size = size
        self.staleness = staleness
        self.updates = updates
        self.ledger = Ledger(
            groups_per_step=size, max_staleness=staleness, updates_per_step=updates
        )
        self.version = self.held = 0
        self.running: dict[int, int] = {}
        self.taken: list[int] = []
        self.trained: set[int] = set()
        self.dropped: set[int] = set()
        self.save()

    def oldest(self, group: Group) -> int:
        return min(version for rollout in group for version in rollout.versions)

    @rule(count=st.integers(1, 20))
    def admit(self, count):
        while count and self.ledger.admits(self.held):
            prompt_id = self.ledger.admit(self.held)
            assert prompt_id not in self.running.keys() | self.trained | self.dropped
            self.running[prompt_id] = self.held
            count -= 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        prompt_id = data.draw(st.sampled_from(sorted(self.running)))
        versions = data.draw(
            st.lists(st.integers(self.running.pop(prompt_id), self.held), min_size=1, max_size=3)
        )
        self.ledger.finish(prompt_id, group_of(prompt_id, *versions))

    @rule()
    def one_rollout_is_longer_than_a_step(self):
        self.admit(100)
        for prompt_id in sorted(self.running)[1:]:
            self.ledger.finish(prompt_id, group_of(prompt_id, self.running.pop(prompt_id)))
        self.take(self.size)
        if len(self.taken) == self.size:
            self.step(0)
            self.pull()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def drop(self, data):
        prompt_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[prompt_id]
        self.ledger.drop(prompt_id, "unlucky")
        self.dropped.add(prompt_id)

    @rule(count=st.integers(1, 5))
    def take(self, count):
        groups = self.ledger.take(count)
        assert len(groups) in (0, min(count, self.size - len(self.taken)))
        for group in groups:
            assert self.version - self.oldest(group) <= self.staleness * self.updates
            assert group[0].prompt.prompt_id not in self.trained
        self.taken += prompt_ids(groups)

    @precondition(lambda self: len(self.taken) == self.size)
    @rule(skipped=st.integers(0, 3))
    def step(self, skipped):
        self.version += max(0, self.updates - skipped)
        row = self.ledger.stepped(self.version)
        assert row["trained_now"] == self.taken
        self.trained |= {*self.taken}
        self.taken = []

    @rule()
    def pull(self):
        self.held = self.version

    @precondition(lambda self: not self.taken)
    @rule()
    def save(self):
        state = json.loads(json.dumps(self.ledger.to_dict())), self.ledger.finished()
        self.saved = (self.version, state, {*self.trained}, {*self.dropped})

    @rule(keep=st.booleans(), fresh=st.booleans(), staleness=st.integers(0, 3))
    def go_back(self, keep, fresh, staleness):
        """The trainer died; or, with a fresh ledger and another bound, everything did."""
        self.version, state, trained, dropped = self.saved
        if fresh:
            self.staleness = staleness
            self.ledger = Ledger(
                groups_per_step=self.size, max_staleness=staleness, updates_per_step=self.updates
            )
        self.ledger.restore(*state, self.version, keep=keep)
        self.held = self.version
        self.running = {}
        self.taken = []
        self.trained = {*trained}
        self.dropped = {*dropped}

    @invariant()
    def everything_adds_up(self):
        if hasattr(self, "ledger"):
            counts = self.ledger.counts()
            assert counts.pop("submitted") == sum(counts.values())
            assert (counts["running"], counts["trained"]) == (len(self.running), len(self.trained))
            assert counts["dropped"] == len(self.dropped)

    def teardown(self):
        """Check that the run can end: every prompt_id is trained on once or dropped."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(6):
            self.held = self.version
            while len(self.taken) < self.size:
                self.admit(100)
                for prompt_id in list(self.running):
                    self.ledger.finish(prompt_id, group_of(prompt_id, self.running.pop(prompt_id)))
                before = len(self.taken)
                self.take(5)
                assert len(self.taken) > before, "nothing can be taken, and nothing more comes"
            self.step(0)


Run.TestCase.settings = settings(max_examples=200, stateful_step_count=60)
TestRandomInterleavings = Run.TestCase


def filled(size: int, staleness: int, *finished: int) -> Ledger:
    """Return a ledger that is full at version 0, with the given prompt_ids finished."""
    ledger = Ledger(groups_per_step=size, max_staleness=staleness)
    while ledger.admits(0):
        ledger.admit(0)
    for prompt_id in finished:
        ledger.finish(prompt_id, group_of(prompt_id, 0))
    return ledger


def test_as_many_are_admitted_as_can_be_trained_on_in_time():
    assert [len(filled(4, staleness)) for staleness in (0, 1, 2)] == [4, 8, 12]


def test_a_long_rollout_does_not_delay_a_step_within_its_bound():
    ledger = filled(2, 1, 1, 2)
    assert prompt_ids(ledger.take(2)) == [1, 2]
    ledger.stepped(1)
    ledger.finish(3, group_of(3, 0))
    assert not ledger.take(2)  # prompt_id 0 is due now
    assert prompt_ids(ledger.take(1)) == [3]
    ledger.finish(0, group_of(0, 0))
    assert prompt_ids(ledger.take(1)) == [0]


def test_a_step_waits_for_a_group_that_is_due():
    assert prompt_ids(filled(2, 1, 2, 3).take(2)) == [2, 3]
    assert prompt_ids(filled(2, 0, 1).take(1)) == [1]
    assert not filled(2, 0, 1).take(2)
    ledger = filled(1, 1, 1)
    assert prompt_ids(ledger.take(1)) == [1]
    ledger.stepped(1)
    ledger.finish(ledger.admit(1), group_of(2, 1))
    assert not ledger.take(1)


def test_in_lockstep_the_order_is_first_in_first_out():
    ledger = filled(3, 0, 2, 0, 1)
    assert prompt_ids(ledger.take(3)) == [0, 1, 2]


def counts(ledger: Ledger) -> str:
    return " ".join(f"{name} {count}" for name, count in ledger.counts().items())


def test_saved_groups_are_restored_and_other_prompts_are_put_again():
    ledger = filled(2, 2, 1, 0, 4)
    assert prompt_ids(ledger.take(2)) == [0, 1]
    ledger.stepped(1)
    again = Ledger(groups_per_step=2, max_staleness=2)
    again.restore(json.loads(json.dumps(ledger.to_dict())), ledger.finished(), 1)
    assert counts(again) == "submitted 6 waiting 3 running 0 finished 1 trained 2 dropped 0"
    assert [again.admit(1) for _ in range(4)] == [2, 3, 5, 6]
    again.finish(2, group_of(2, 1))
    assert again.take(2) == [group_of(4, 0), group_of(2, 1)]


def test_a_lost_trainer_drops_the_groups_of_its_lost_versions():
    ledger = filled(1, 3, 0, 1, 2)
    saved = ledger.to_dict(), ledger.finished()
    ledger.take(1)
    ledger.stepped(1)
    ledger.finish(3, group_of(3, 0, 1))
    ledger.admit(1)
    ledger.restore(Ledger(groups_per_step=1, max_staleness=3).to_dict(), {}, 0, keep=True)
    assert counts(ledger) == "submitted 5 waiting 3 running 0 finished 2 trained 0 dropped 0"
    ledger.restore(*saved, 0)
    assert ledger.counts()["finished"] == 3


def test_a_ledger_that_does_not_add_up_is_an_error():
    ledger = filled(2, 0, 0, 1)
    ledger.take(2)
    ledger._taken.pop()
    with pytest.raises(RunError, match="does not add up: {'submitted': 2, .*'trained': 1"):
        ledger.stepped(1)
