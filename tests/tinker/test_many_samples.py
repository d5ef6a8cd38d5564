"""Many samples at once: none is lost, every client gets its share, results that were fetched are
not written one by one, and nothing stays in memory.
"""

import asyncio
from collections import Counter
from unittest.mock import patch

import pytest

from rl.session.concurrency import Shares
from rl.tinker import store
from tests.kit.tables import long
from tests.tinker.clients import Running
from tests.tinker.test_app import PARAMS, ask, sample_of, sampler_of, tokens_of
from tests.tinker.toy import ToySession

ROOM = 16
LARGE = long(64, 32)


class Counting(ToySession):
    """Session that notes the order of its samples, and how many it has at once."""

    def __init__(self, **options):
        super().__init__(**options)
        self.order = []
        self.most = self.now = 0

    async def sample(self, requests, *, weights):
        self.order.append(requests[0].request_id.partition(":")[0])
        self.now += len(requests)
        self.most = max(self.most, self.now)
        try:
            return await super().sample(requests, weights=weights)
        finally:
            self.now -= len(requests)


async def fetched(running, sampler, promises):
    """Return the results of a client, fetched as the SDK does: what is ready, each by itself."""
    found = {}
    cursor = 0
    while len(found) < len(promises):
        target = {"target": {"sampling_session_id": sampler}, "prev_cursor": cursor, "timeout": 30}
        ready = await running.ask("retrieve_futures", target)
        cursor = ready["cursor"]
        for row in ready["completions"]:
            assert row["state"] == "finished"
            id = row["request_id"]
            found[id] = await running.result({"request_id": id})
            await running.ask(
                "retrieve_futures",
                {
                    "target": {"sampling_session_id": sampler},
                    "prev_cursor": cursor,
                    "timeout": 0,
                    "retrieved_request_ids": [id],
                },
            )
    return found


@pytest.mark.parametrize(("clients", "samples"), [(6, 16), LARGE])
async def test_many_samples_in_flight_are_all_answered_and_shared_fairly(
    tmp_path, clients, samples
):
    async with Running(tmp_path, Counting(pause=0.002)) as running:
        parts = running.server.parts
        parts.shares = Shares(lambda: ROOM)
        sessions = [await running.open(number) for number in range(clients)]
        own = [await sampler_of(running, session) for session in sessions]

        async def promised(sampler):
            params = [PARAMS | {"seed": seed} for seed in range(samples)]
            return await asyncio.gather(
                *(
                    ask(running, sampler, n + 1, sampling_params=each)
                    for n, each in enumerate(params)
                )
            )

        promises = await asyncio.gather(*map(promised, own))
        everything = await asyncio.gather(
            *(fetched(running, *pair) for pair in zip(own, promises, strict=True))
        )
        wanted = None
        for results, asked in zip(everything, promises, strict=True):
            tokens = [tokens_of(sample_of(results[each["request_id"]])) for each in asked]
            wanted = wanted or tokens
            assert tokens == wanted  # the same seeds of the same weights
        assert len({str(each) for each in wanted}) == samples
        assert running.session.most <= ROOM
        order = running.session.order
        assert Counter(order) == dict.fromkeys(sessions, samples)
        assert parts.futures.pending == 0
        assert parts.futures._bytes == 0 and not parts.futures._all
        assert await parts.store.samples() == []


async def test_a_client_with_many_samples_does_not_hold_up_another(tmp_path):
    async with Running(tmp_path, Counting()) as running:
        running.server.parts.shares = Shares(lambda: 2)
        running.server.samplers.running.clear()
        greedy, modest = [await running.open(number) for number in range(2)]
        own = [await sampler_of(running, session) for session in (greedy, modest)]
        promises = [await ask(running, own[0], number) for number in range(1, 21)]
        promises += [await ask(running, own[1], number) for number in range(1, 5)]
        running.server.samplers.running.set()
        for promise in promises:
            await running.result(promise)
        places = [n for n, each in enumerate(running.session.order) if each == modest]
        assert places[-1] <= 2 * len(places) + 2


async def test_generators_that_join_and_leave_change_the_number_of_samples_at_once(tmp_path):
    async with Running(tmp_path, Counting(pause=0.002)) as running:
        own = running.session
        sampler = await sampler_of(running, await running.open())
        running.server.parts.config.generator.max_running_requests = 2
        for generators, most in ((1, 4), (3, 12), (2, 8)):
            own.generator_versions = dict.fromkeys(range(generators))
            own.most = 0
            number = 100 * generators
            running.server.samplers.running.clear()
            promises = [await ask(running, sampler, number + each) for each in range(20)]
            running.server.samplers.running.set()
            for promise in promises:
                await running.result(promise)
            assert own.most == most


@patch.object(store, "LAZY_S", 3600.0)
async def test_a_result_that_is_fetched_is_not_written_by_itself(tmp_path):
    async with Running(tmp_path) as running:
        sampler = await sampler_of(running, await running.open())
        own = running.server.parts.store
        commits = []
        commit = own._commit
        own._commit = lambda batch: commits.append(len(batch)) or commit(batch)
        promises = [await ask(running, sampler, number) for number in range(1, 9)]
        assert 1 <= len(commits) <= len(promises)
        before = len(commits)
        for promise in promises:
            await running.result(promise)
        assert len(commits) == before
        promise = await ask(running, sampler, 9)
        assert commits[before:] == [len(promises) + 1]
        assert await own.samples() == [f"{sampler}:9"]
        store.LAZY_S = 0.01
        await running.result(promise)
        while len(commits) == before + 1:  # it is written after a while
            await asyncio.sleep(0.01)
        assert await own.samples() == []
