"""Freed: state without a client. Kept: what others read, whatever a client sends."""

import asyncio
import json
import os
from unittest.mock import patch
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.tinker import app, catalog, samplers, store
from rl.tinker.parts import MODELS, Samples
from rl.types import Completion
from tests.tinker.clients import BASE, Running
from tests.tinker.test_app import GRAPH, ask, sample, sampler_of

LOSS = {"inputs": [{"name": "logprobs", "rank": 1}], "graph": GRAPH, "name": "mine"}


async def snapshot(client, number, **fields):
    """Return the id of a sampler of the weights of now."""
    fields["sampling_session_seq_id"] = number
    made = await client.call("save_weights_for_sampler", **fields)
    return (await client.done(made))["sampling_session_id"]


async def finish(running, session):
    body = {"reason": {"type": "success"}}
    await running.get(f"sessions/{session}/finish", "POST", body)
    await running.server.parts.store.flush()


async def folders(running, count):
    """Wait until that many folders of weights are left; return their names."""
    place = running.server.parts.checkpoints._folder
    facts = running.server.parts.store.facts["folder"]
    while len(facts) > count:
        await asyncio.sleep(0)
    return {*os.listdir(place)}


async def test_a_session_that_finishes_frees_what_only_its_clients_use(tmp_path):
    async with Running(tmp_path) as running:
        client, other = await running.train(0), await running.train(1)
        for number, kind in enumerate(("snapshot", "snapshot", "inflight")):
            await sample(running, await snapshot(client, number, kind=kind))
        await ask(running, f"{client.session}:sample:0", 2)  # never fetched
        kept = await snapshot(other, 0)
        path = await client.saved("a", "save_weights_for_sampler")
        body = LOSS | {"session_id": client.session, "custom_loss_seq_id": 1}
        await running.ask("create_custom_loss", body)
        await finish(running, client.session)
        parts = running.server.parts
        assert [*parts.store.facts["sampler"]] == [kept] and parts.store.facts["loss"] == {}
        checkpoints = parts.checkpoints
        names = {checkpoints.find(path)["folder"], parts.store.get("sampler", kept)["folder"]}
        assert await folders(running, 2) == names
        own = running.server.samplers
        assert not own._ready.keys() - {kept} and not own._used.keys() - {kept}
        answer = await running.post("session_heartbeat", {"session_id": client.session})
        assert answer.status_code == 410
        assert isinstance((await sample(running, kept)).sequences[0].tokens, bytes)


async def test_the_state_of_a_model_is_freed_with_its_session(tmp_path):
    async with Running(tmp_path, state_every=1) as running:
        client = await running.train()
        await client.backward(1, 2)
        await client.done(await client.step())
        parts = running.server.parts
        while not parts.store.facts["model"][client.id]["state"]:
            await asyncio.sleep(0)
        assert len(await folders(running, 1)) == 1
        await finish(running, client.session)
        assert await folders(running, 0) == set()
        late = await running.post("optim_step", {"model_id": client.id, "seq_id": 3})
        assert late.status_code == 410 and "has finished" in late.text
        await running.server.models._send_away(running.server.models._models[client.id])
        assert await folders(running, 0) == set()


@patch.object(samplers, "MAX_UNNAMED", 2)
async def test_unnamed_weights_of_a_model_are_bounded_by_their_last_use(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        first, second = await snapshot(client, 0), await snapshot(client, 1)
        for seq, each in enumerate((second, first), 1):
            await sample(running, each, seq)
        third = await snapshot(client, 2)
        await sample(running, third)
        assert [*running.server.parts.store.facts["sampler"]] == [first, third]
        assert len(await folders(running, 2)) == 2
        gone = await running.post("asample", {"sampling_session_id": second, "seq_id": 9})
        assert gone.status_code == 404 and "forgotten" in gone.text
        for number in range(3, 6):
            await snapshot(client, number)
        running.server.samplers.expire()
        assert len(await folders(running, 2)) == 2


async def test_facts_of_finished_sessions_make_room(tmp_path):
    with patch.object(store, "MAX_FACTS", 3):
        async with Running(tmp_path) as running:
            kept = await running.train(0)
            await kept.done(await kept.call("save_weights", path="mine"))
            await finish(running, kept.session)
            for number in range(1, 8):
                client = await running.train(number)
                body = LOSS | {"session_id": client.session}
                for loss in range(2):
                    made = await running.ask(
                        "create_custom_loss", body | {"custom_loss_seq_id": loss}
                    )
                    assert "loss_id" in await running.result(made)
                await running.server.models._forget(running.server.models._models[client.id])
                if number < 7:
                    await finish(running, client.session)
            facts = running.server.parts.store.facts
            assert {kept.id, client.id} <= facts["model"].keys() and len(facts["model"]) <= 3
            for number in range(8, 10):
                await running.open(number)
            full = await running.post("create_session", {}, **{"x-idempotency-key": "more"})
            assert full.status_code == 429
    async with Running(tmp_path) as running:
        assert kept.id in running.server.models._models


async def test_samplers_remember_no_names_of_strangers_and_no_fetched_rows(tmp_path):
    async with Running(tmp_path) as running:
        for number in range(3):
            body = {"sampling_session_id": f"none-{number}", "seq_id": 1}
            assert (await running.post("asample", body)).status_code == 404
        sampler = await sampler_of(running, await running.open())
        for seq in range(3):
            await sample(running, sampler, seq)
        own = running.server.samplers
        assert [*own._used] == [sampler] and own._ready[sampler] == {0: {}}


async def test_links_to_files_expire(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        await client.done(await client.call("save_weights_external", path="out"))
        place = f"training_runs/{client.id}/checkpoints/external_weights/out"
        ask_urls = f"{place}/external_weights_urls"
        url = (await running.get(ask_urls))["urls"]["state.json"]
        assert (await running.http.get(url)).status_code == 200
        with patch.object(catalog, "URL_S", -1):
            await running.get(ask_urls)
        old = await running.http.get(url)
        assert old.status_code == 404 and "expired" in old.text
        await running.get(ask_urls)
        assert (await running.http.get(url)).status_code == 200


NOT_JSON = [b"NaN", b"Infinity", b"[-Infinity]", b"1" + b"0" * 5000, b'"' + b"x" * 10**5 + b'"']


@pytest.mark.parametrize("value", NOT_JSON, ids=lambda each: each[:9].decode())
async def test_metadata_that_no_list_could_show_is_refused(tmp_path, value):
    async with Running(tmp_path) as running:
        client = await running.train()
        ids = b'"session_id": "%s", "model_seq_id": 5' % client.session.encode()
        for path, fields in (
            ("create_session", b""),
            ("create_model", b'%s, "base_model": "%s",' % (ids, BASE.encode())),
        ):
            body = b'{%s "user_metadata": {"a": %s}}' % (fields, value)
            answer = await running.post(path, body)
            assert answer.status_code == 400 and "user_metadata" in answer.text, answer.text
        fields = b'"model_id": "%s", "seq_id": 1, "path": "a"' % client.id.encode()
        body = b'{%s, "user_metadata": {"a": %s}}' % (fields, value)
        answer = await running.post("save_weights", body)
        found = await running.result(answer.json()) if answer.status_code == 200 else answer.json()
        assert "error" in found
        for path in ("sessions", f"sessions/{client.session}", "training_runs", "checkpoints"):
            await running.get(path)


async def test_a_database_with_nan_is_listed(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        text = json.dumps(running.server.parts.store.get("model", client.id))
        spoiled = text.replace('"user_metadata": null', '"user_metadata": {"a": NaN}')
        sql = "INSERT OR REPLACE INTO facts VALUES (?, ?, ?)"
        running.server.parts.store._write(sql, "model", client.id, spoiled)
    async with Running(tmp_path) as running:
        (run,) = (await running.get("training_runs"))["training_runs"]
        assert run["user_metadata"] == {"a": None}


PARTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["é", "\0", "..", "9" * 5000, "-1", "a" * 5000, "%2e%2e", "weights", "\ud7ff"]),
)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["x-api-key", "authorization", "x-idempotency-key", "content-encoding", "origin"]
    ),
    st.binary(max_size=8).filter(lambda each: not {*b"\r\n\0"} & {*each}),
)


def test_no_path_query_or_header_makes_the_server_fail(tmp_path_factory):
    routes = [(verb, path) for verb, path, _ in [*app.OTHERS, *catalog.LISTED]]
    routes += [("POST", path) for path in app.POSTED.split()]

    async def ask(requests, key):
        async with Running(tmp_path_factory.mktemp("run"), key=key) as running:
            with patch.object(app, "LONG_POLL_S", 0.01):
                for (verb, path), part, other, headers in requests:
                    names = {"session", "sampler", "run", "kind", "name", "key", "file:path"}
                    for name in names:
                        path = path.replace(f"{{{name}}}", quote(part, safe=""))
                    url = f"/api/v1/{path}?offset={quote(other)}&limit={quote(part)}"
                    given = {name.encode(): each for name, each in headers.items()}
                    given[b"content-type"] = b"application/json"
                    body = {"request_id": f"{part}:{other}", "path": part}
                    content = b"" if verb == "GET" else json.dumps(body).encode()
                    answer = await running.http.request(verb, url, content=content, headers=given)
                    assert answer.status_code < 500, (verb, url, given, answer.text)

    @settings(
        max_examples=15, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
    )
    @given(
        st.lists(st.tuples(st.sampled_from(routes), PARTS, PARTS, HEADERS), min_size=8, max_size=8),
        st.sampled_from([None, "key", "schlüssel"]),
    )
    def run(requests, key):
        asyncio.run(ask(requests, key))

    run()


async def test_a_key_is_compared_in_its_bytes(tmp_path):
    async with Running(tmp_path, key="schlüssel") as running:
        for given, status in (("schlüssel".encode(), 200), (b"schl\xfcssel", 401)):
            answer = await running.http.get("/api/v1/sessions", headers={b"x-api-key": given})
            assert answer.status_code == status


def test_samples_of_models_that_take_no_more_steps_make_room(tmp_path):
    samples = Samples(tmp_path, str)
    drawn = Completion(tokens=[1], logprobs=[0.0], versions=[0], finish_reason="length")
    names = [str(number) for number in range(MODELS + 1)]
    for name in names:
        (tmp_path / name).mkdir()
        samples.add(name, [2], [drawn])
    for name in names:
        samples.write(name, 1)
    assert {each.parent.name for each in tmp_path.glob("*/rollouts")} == {*names[1:]}
