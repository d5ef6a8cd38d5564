"""Samples of clients that have gone make room for those of others."""

import asyncio
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest

from rl.gateway.http import serving
from rl.tinker import samplers
from rl.tinker.app import routes_of
from tests.tinker.clients import Running
from tests.tinker.test_app import ask, sampler_of
from tests.tinker.toy import ToySession


class Endless(ToySession):
    """Session whose samples have no end."""

    async def sample(self, requests, *, weights):
        self.calls.append(("sample", weights))
        await asyncio.Event().wait()

    async def until(self, *call):
        while call not in self.calls:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def asked(folder):
    """Yield a server and the promise of a sample that has begun."""
    async with Running(folder, Endless()) as running:
        sampler = await sampler_of(running, await running.open())
        promise = await ask(running, sampler)
        await running.session.until("sample", "base")
        yield running, promise["request_id"]


async def require_lost(running, id):
    await running.session.until("abort", f"{id}:0")
    answer = await running.post("retrieve_future", {"request_id": id})
    assert answer.status_code == 410  # the SDK samples again


async def test_samples_of_a_session_end_with_it(tmp_path):
    async with asked(tmp_path) as (running, id):
        session = id.partition(":")[0]
        await running.get(f"sessions/{session}/finish", "POST", {"reason": {"type": "success"}})
        await require_lost(running, id)


@patch.object(samplers, "BEAT_S", 0.05)
async def test_samples_are_given_up_if_their_client_no_longer_asks_for_results(tmp_path):
    """Cover samples that are cancelled while their promise is sent; heartbeats go on."""
    async with asked(tmp_path) as (running, id):
        target = {"sampling_session_id": id.rpartition(":")[0]}
        await running.ask("retrieve_futures", {"target": target, "timeout": 0})
        while ("abort", f"{id}:0") not in running.session.calls:
            await running.ask("session_heartbeat", {"session_id": id.partition(":")[0]})
            await asyncio.sleep(0.02)
        again = await ask(running, target["sampling_session_id"], seq=2)
        await running.session.until("abort", f"{again['request_id']}:0")


@pytest.mark.parametrize("sign", ["none", "heartbeats", "a request for the result"])
@patch.object(samplers, "BEAT_S", 0.05)
async def test_samples_are_given_up_if_no_request_of_their_session_comes(tmp_path, sign):
    async with asked(tmp_path) as (running, id):
        body = {"request_id": id}
        if sign == "heartbeats":
            for _ in range(40):
                await running.ask("session_heartbeat", {"session_id": id.partition(":")[0]})
                await asyncio.sleep(0.02)
        if sign == "a request for the result":
            waiting = asyncio.create_task(running.post("retrieve_future", body))
            await asyncio.sleep(0.8)
            waiting.cancel()
        if sign != "none":
            assert ("abort", f"{id}:0") not in running.session.calls
        await require_lost(running, id)


@pytest.mark.parametrize("path", ["asample", "retrieve_future", "retrieve_futures"])
async def test_a_connection_that_closes_is_noticed(tmp_path, path):
    """Cover a sample before its promise is sent, and a request that waits for a result."""
    with patch.object(samplers, "BEAT_S", 3600.0 if path == "asample" else 0.05):
        async with asked(tmp_path) as (running, id):
            sampler = id.rpartition(":")[0]
            if path == "asample":
                id = f"{sampler}:2"
            body = {
                "asample": b'{"sampling_session_id": "%s", "seq_id": 2, "prompt": {"chunks": '
                b'[{"tokens": [1]}]}, "sampling_params": {}}' % sampler.encode(),
                "retrieve_future": b'{"request_id": "%s"}' % id.encode(),
                "retrieve_futures": b'{"target": {"sampling_session_id": "%s"}}' % sampler.encode(),
            }[path]
            async with serving(None, more=routes_of(running.server, None)) as url:
                host, port = url.removeprefix("http://").split(":")
                _, writer = await asyncio.open_connection(host, int(port))
                head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: {host}\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                flushed = asyncio.Event()
                if path == "asample":  # hold the promise back until the connection is closed
                    flush = running.server.parts.store.flush

                    async def late():
                        await flush()
                        await flushed.wait()

                    running.server.parts.store.flush = late
                writer.write(head.encode() + body)
                await writer.drain()
                if path == "asample":
                    while running.server.parts.futures.get(id) is None:
                        await asyncio.sleep(0.01)
                else:
                    while not running.server.samplers._listeners:
                        await asyncio.sleep(0.01)
                writer.close()
                await writer.wait_closed()
                await asyncio.sleep(0.1)
                flushed.set()
                await running.session.until("abort", f"{id}:0")
