"""A failure of one request, disk or restoration costs no other client, and is not for good."""

import os
import sqlite3
from unittest.mock import patch

import pytest

from rl.errors import ActorFailure, RankLost, RunError, StorageFull
from rl.tinker import models, samplers, store
from tests.tinker.clients import PROTO, Running, Training
from tests.tinker.test_app import ask, sampler_of
from tests.tinker.toy import ToySession, digest

BAD = 13
"""Token of the requests that fail."""


async def test_a_request_that_failed_has_no_effect_and_is_not_replayed(tmp_path):
    class Failing(ToySession):
        """Session that fails on batches with the token BAD, after a part of the work."""

        fails = True

        async def forward_backward(self, batch, loss, *, adapter):
            if self.fails and BAD in batch.tokens.tolist():
                self._all[adapter].pending = digest("a part")
                where = {"actor": "trainer", "rank": 0, "call": "forward_backward"}
                raise ActorFailure("CUDA out of memory", kind="raised", **where)
            return await super().forward_backward(batch, loss, adapter=adapter)

    async with Running(tmp_path / "calm") as running:
        client = await running.train()
        await client.done(await client.backward(1, 2))
        await client.learn(1, 3)
        await client.learn(1, 4)
        expected = await client.weights()
    running = await Running(tmp_path / "failing", Failing()).__aenter__()
    client = await running.train()
    await client.done(await client.backward(1, 2))
    failed = await client.done(await client.backward(1, BAD))
    assert failed["category"] == "server" and "out of memory" in failed["error"]
    await client.learn(1, 3)
    await running.kill()
    healthy = Failing()
    healthy.fails = False
    async with Running(tmp_path / "failing", healthy) as running:
        client.running = running
        await client.learn(1, 4)
        assert await client.weights() == expected
        assert await client.done({"request_id": f"{client.id}:2"}) == failed


@pytest.mark.parametrize("is_old", [False, True])
async def test_a_restoration_that_failed_is_tried_again_at_the_next_start(tmp_path, is_old):
    class Unreadable(ToySession):
        async def load_state(self, folder, *, adapter, optimizer=True):
            await super().load_state(folder, adapter=adapter, optimizer=optimizer)
            raise RunError("the storage does not answer")

    running = await Running(tmp_path, state_every=1).__aenter__()
    client = await running.train()
    await client.learn(1, 2)
    expected = await client.weights()
    await running.kill()
    async with Running(tmp_path, Unreadable()) as running:
        client.running = running
        failed = await client.done(await client.backward(1, 3))
        assert "could not be restored" in failed["error"] and "restart" in failed["error"]
        other = await running.train(1)
        await other.learn(1, 2)
        if is_old:  # older servers wrote that down
            facts = running.server.parts.store
            text = "the model could not be restored: x"
            facts.put("model", client.id, facts.get("model", client.id) | {"failed": text})
    async with Running(tmp_path) as running:
        client.running = running
        assert await client.weights() == expected
        assert isinstance(await client.learn(1, 4), bytes)


class Deadly(ToySession):
    """Session whose trainer dies of batches with the token BAD."""

    async def forward_backward(self, batch, loss, *, adapter):
        if BAD in batch.tokens.tolist():
            self.kill()
        return await super().forward_backward(batch, loss, adapter=adapter)


async def test_a_request_that_kills_the_trainer_is_given_up(tmp_path):
    async with Running(tmp_path, Deadly()) as running:
        deadly, other = await running.train(0), await running.train(1)
        promise = await deadly.backward(1, BAD)
        found = await other.done(await other.backward(1, 2))
        assert isinstance(found, bytes)
        failed = await deadly.done(promise)
        assert failed["category"] == "server" and "trainer was lost" in failed["error"]
        assert running.session.recovered == models.LIVES
        assert isinstance(await deadly.learn(1, 2), bytes)
        assert running.session.recovered == models.LIVES


async def test_a_request_that_ends_the_server_with_the_trainer_is_given_up(tmp_path):
    """Losses are counted across starts of the server."""

    class Final(Deadly):
        def recover(self, failure):
            raise failure

    async def end(running):
        with pytest.raises(ActorFailure):
            await running._work
        await running.kill()

    running = await Running(tmp_path, Final()).__aenter__()
    client = await running.train()
    promise = await client.backward(1, BAD)
    await end(running)
    for _ in range(models.LIVES - 1):
        running = await Running(tmp_path, Final()).__aenter__()
        await end(running)
    async with Running(tmp_path, Final()) as running:
        client.running = running
        assert "trainer was lost" in (await client.done(promise))["error"]
        assert isinstance(await client.learn(1, 2), bytes)


async def test_a_model_whose_restoration_kills_the_trainer_leaves_the_others_alone(tmp_path):
    class Cursed(ToySession):
        async def load_state(self, folder, *, adapter, optimizer=True):
            self.kill()
            await super().load_state(folder, adapter=adapter, optimizer=optimizer)

    async with Running(tmp_path, state_every=1) as running:
        client = await running.train()
        await client.learn(1, 2)
        expected = await client.weights()
    async with Running(tmp_path, Cursed()) as running:
        client.running = running
        for _ in range(3):
            failed = await client.done(await client.backward(1, 3))
            assert failed["category"] == "server" or "restored" in failed["error"]
        assert running.session.recovered == models.LIVES
        await (await running.train(1)).learn(1, 2)
    async with Running(tmp_path) as running:
        client.running = running
        assert await client.weights() == expected


async def test_a_full_disk_ends_no_training(tmp_path):
    """States and metrics are left out, and said once; the journal restores the models."""

    class Full(ToySession):
        async def save_state(self, folder, *, adapter):
            folder.mkdir()
            raise StorageFull("no space left on device")

    running = await Running(tmp_path / "full", Full(), state_every=1).__aenter__()
    clients = [await running.train(number) for number in range(models.MAX_ADAPTERS + 1)]
    folder = tmp_path / "full/models" / clients[0].id
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").symlink_to("/dev/full")
    for client in (clients[0], *clients, clients[0]):
        await client.learn(1, 2)
    weights = await clients[0].weights()
    said = [each for each in running.warnings if clients[0].id in each]
    assert any("metrics" in each for each in said) and any("state" in each for each in said)
    await running.kill()
    async with Running(tmp_path / "calm") as running:
        client = await running.train()
        for _ in range(3):
            await client.learn(1, 2)
        assert await client.weights() == weights
    async with Running(tmp_path / "full") as running:
        clients[0].running = running
        assert await clients[0].weights() == weights


class Broken:
    """Connection of a database that fails in the given way while ``error`` is set."""

    def __init__(self, database, error):
        self._database = database
        self.error = error

    def execute(self, sql, *values):
        if self.error and not sql.startswith("SELECT"):
            raise self.error
        return self._database.execute(sql, *values)

    def __enter__(self):
        return self._database.__enter__()

    def __exit__(self, *error):
        return self._database.__exit__(*error)

    def close(self):
        self._database.close()


@pytest.mark.parametrize(
    "error",
    [
        sqlite3.OperationalError("database or disk is full"),
        sqlite3.DatabaseError("database disk image is malformed"),
    ],
)
@patch.object(store, "RETRY_S", 0.01)
async def test_a_database_that_cannot_be_written_is_said_until_it_can(tmp_path, error):
    async with Running(tmp_path) as running:
        client = await running.train()
        kept = running.server.parts.store
        kept._database = broken = Broken(kept._database, error)
        body = client.data(1, 2)
        for _ in range(2):
            answer = await running.post("forward_backward", body, **{"content-type": PROTO})
            assert answer.status_code == 503 and str(error) in answer.text
            answer = await running.post("create_session", {"display_name": "x"})
            assert answer.status_code == 503
        assert (await running.http.get("/api/v1/healthz")).status_code == 503
        assert len([each for each in running.warnings if str(error) in each]) == 1
        broken.error = None
        await kept.until_written()
        promise = await running.ask("forward_backward", body, **{"content-type": PROTO})
        assert isinstance(await client.done(promise), bytes)
        assert "metrics" in await client.done(await client.step())


async def test_a_server_does_not_start_with_a_damaged_database(tmp_path):
    async with Running(tmp_path) as running:
        await running.train()
    whole = (tmp_path / "server.db").read_bytes()
    (tmp_path / "server.db").write_bytes(b"\xff" * len(whole))
    with pytest.raises(RunError, match=r"server\.db cannot be used: .*backup"):
        await Running(tmp_path).__aenter__()
    assert os.listdir(tmp_path / "weights") == []


@pytest.mark.parametrize("is_old", [False, True])
async def test_a_request_under_an_old_number_is_compared_after_a_restart(tmp_path, is_old):
    kind = {"content-type": PROTO}
    async with Running(tmp_path) as running:
        client = await running.train()
        await client.learn(1, 2)
    if is_old:  # a server without digests
        with sqlite3.connect(tmp_path / "server.db") as database:
            database.execute("ALTER TABLE requests DROP COLUMN digest")
        database.close()
    async with Running(tmp_path) as running:
        again = Training(running, client.session)
        if not is_old:
            other = await running.post("forward_backward", again.data(3, 4, seq=1), **kind)
            assert other.status_code == 400 and "has come before with other content" in other.text
        same = await running.ask("forward_backward", again.data(1, 2, seq=1), **kind)
        assert isinstance(await running.result(same), bytes)
        assert isinstance(await again.done(await again.backward(1, 2, seq=3)), bytes)


async def test_a_sample_whose_processes_are_lost_again_and_again_fails(tmp_path, monkeypatch):
    async def lost(requests, **options):
        calls.append(requests)
        raise RankLost("it died", actor="generator-0", rank=0, call="generate", kind="")

    calls = []
    async with Running(tmp_path) as running:
        sampler = await sampler_of(running, await running.open())
        monkeypatch.setattr(running.session, "sample", lost)
        with patch.object(samplers, "AGAIN_S", 0.0):
            found = await running.result(await ask(running, sampler, 1))
        assert found["category"] == "server" and "lost 3 times" in found["error"], found
        assert len(calls) == samplers.LIVES
