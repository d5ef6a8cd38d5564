"""Errors, keys, limits and the life of the gateway's server."""

import asyncio
import contextlib
import dataclasses
import json

import httpx
import numpy as np
import openai
import pytest

from rl import http_server
from rl.errors import ConfigError, RunError
from rl.gateway import gateway as sessions
from rl.gateway.http import serving
from rl.gateway.protocol import ApiError
from rl.sampling_mask import SamplingMask
from tests.gateway.agent_tasks import Clock
from tests.gateway.agents import LONGEST, Policy, make_gateway, server

MESSAGES = [{"role": "user", "content": "1 + 2?"}]
CHAT = {"model": "policy", "messages": MESSAGES}
OTHER = {"type": "function", "function": {"name": "other"}}
GENERATE = "/inference/v1/generate"


class Held(Policy):
    """Policy that answers when it is let go."""

    def __init__(self):
        super().__init__(habits=["plain"])
        self.asked = asyncio.Event()
        self.let_go = asyncio.Event()

    async def __call__(self, ask):
        self.asked.set()
        await self.let_go.wait()
        return await super().__call__(ask)


def post(requests, *, policy=None, headers=None, **options):
    """Return status and JSON of each request, a path and a body, to one new server."""

    async def work():
        async with server(policy or Policy(), **options) as (gateway, url, _):
            gateway.open_session("known")
            async with httpx.AsyncClient(timeout=60) as client:
                answers = []
                for path, body in requests:
                    content = body if isinstance(body, bytes) else json.dumps(body).encode()
                    own = {"content-type": "application/json", **(headers or {})}
                    answer = await client.post(url + path, content=content, headers=own)
                    answers.append((answer.status_code, answer.json()))
                return answers

    return asyncio.run(work())


TOP = ("invalid_value", "top_logprobs is ")
CASES = [
    ("/v1/chat/completions", b"{", 400, "invalid_json", "not JSON"),
    ("/v1/chat/completions", b"\xff", 400, "invalid_json", "not JSON"),
    ("/v1/chat/completions", b"[" * 10**5, 400, "invalid_json", "recursion"),
    ("/v1/chat/completions", [], 400, "invalid_value", "the body"),
    ("/v1/chat/completions", {"model": "policy"}, 400, "invalid_value", "messages"),
    ("/v1/chat/completions", CHAT | {"messages": []}, 400, "invalid_value", "messages"),
    ("/v1/chat/completions", CHAT | {"messages": [{}]}, 400, "invalid_value", "role"),
    ("/v1/chat/completions", CHAT | {"n": 0}, 400, "invalid_value", "n is 0: "),
    ("/v1/chat/completions", CHAT | {"n": 65}, 400, "invalid_value", "n is 65: "),
    ("/v1/chat/completions", CHAT | {"n": True}, 400, "invalid_value", "n is True: "),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 3}, 400, "invalid_value", "needs logprobs"),
    ("/v1/chat/completions", CHAT | {"logprobs": False, "top_logprobs": 1}, 400, *TOP),
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, 400, *TOP),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, 400, "invalid_value", "equal to 20"),
    ("/v1/chat/completions", CHAT | {"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ("/v1/chat/completions", CHAT | {"temperature": -1}, 400, "invalid_value", "temperature"),
    ("/v1/chat/completions", CHAT | {"temperature": 1e-5}, 400, "invalid_value", "0.01"),
    ("/v1/chat/completions", CHAT | {"temperature": 2.1}, 400, "invalid_value", "temperature"),
    ("/v1/chat/completions", CHAT | {"stop": [1]}, 400, "invalid_value", "stop"),
    ("/v1/chat/completions", CHAT | {"wat": 1}, 400, "unsupported_parameter", "wat"),
    ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, 400, "invalid_value", "'auto'"),
    ("/v1/chat/completions", CHAT | {"tool_choice": OTHER}, 400, "invalid_value", "name one"),
    ("/v1/chat/completions", CHAT | {"model": "gpt"}, 404, "model_not_found", "'gpt'"),
    ("/sessions/none/v1/chat/completions", CHAT, 404, "session_not_found", "'none'"),
    ("/v1/nothing", CHAT, 404, "unknown_url", "/v1/nothing"),
    ("/v1/models", CHAT, 405, "unknown_url", "Method Not Allowed"),
    ("/v1/completions", {"prompt": []}, 400, "invalid_value", "prompt"),
    ("/v1/completions", {"prompt": "a " * LONGEST}, 400, "context_length_exceeded", "tokens"),
    ("/v1/completions", {"prompt": [10**6]}, 400, "invalid_value", "below"),
    ("/v1/completions", {"prompt": [-1]}, 400, "invalid_value", "below"),
    (GENERATE, {"token_ids": []}, 400, "invalid_value", "token_ids"),
    (GENERATE, {"token_ids": [1], "stream": True}, 400, "invalid_value", "stream"),
    (
        GENERATE,
        {"token_ids": [1], "sampling_params": {"min_p": 1.1}},
        400,
        "invalid_value",
        "min_p",
    ),
    (
        GENERATE,
        {"token_ids": [1], "sampling_params": {"extra_args": {"session": "none"}}},
        404,
        "session_not_found",
        "'none'",
    ),
]  # fmt: skip


def test_requests_that_cannot_be_served_get_typed_errors():
    policy = Policy()
    answers = post([(path, body) for path, body, *_ in CASES], policy=policy)
    wrong = []
    for (path, body, status, code, words), (found, answer) in zip(CASES, answers, strict=True):
        error = answer.get("error", {"code": None, "type": None, "message": ""})
        kind = found, error["code"], error["type"]
        if kind != (status, code, "invalid_request_error") or words not in error["message"]:
            wrong.append((path, str(body)[:100], found, error))
    assert wrong == []
    assert policy.turns == []


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"limits": {"body_bytes": 100}}, 413, "body_too_large"),
        ({"headers": {"content-type": "text/plain"}}, 415, "invalid_content_type"),
        ({"headers": {"host": "evil.example"}}, 403, "wrong_host"),
        ({"headers": {"origin": "https://evil.example"}}, 403, "wrong_origin"),
        ({"headers": {"origin": "null"}}, 403, "wrong_origin"),
        ({"key": "right"}, 401, "invalid_api_key"),
        ({"key": "right", "headers": {"authorization": "Bearer wrong"}}, 401, "invalid_api_key"),
        ({"limits": {"waiting": 0}}, 429, "too_many_requests"),
        ({"limits": {"session_tokens": 0}}, 429, "session_full"),
    ],
)
def test_a_client_that_may_not_ask_gets_a_typed_error(options, status, code):
    body = CHAT | {"messages": [{"role": "user", "content": "1 + 2?" * 20}]}
    path = "/sessions/known/v1/chat/completions"
    ((found, answer),) = post([(path, body)], **options)
    assert (found, answer["error"]["code"]) == (status, code)


def test_a_page_of_another_site_opens_no_session():
    here, elsewhere = (
        post([("/sessions", b"")], headers={"origin": origin})
        for origin in ("http://localhost:3000", "https://evil.example")
    )
    assert here[0][0] == 200
    assert (elsewhere[0][0], elsewhere[0][1]["error"]["code"]) == (403, "wrong_origin")


def test_a_head_that_is_too_long_or_too_slow_ends_its_connection(monkeypatch):
    async def head(url, text):
        """Send the begin of a head; return what comes back until the connection ends."""
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-a: " + text)
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                await writer.drain()
                return await reader.read()
        return b""

    async def work():
        async with server(Policy()) as (_, url, client):
            monkeypatch.setattr(http_server, "HEAD_S", 600.0)
            said = await head(url, b"a" * 2**20)
            assert b"400 Bad Request" in said or not said
            monkeypatch.setattr(http_server, "HEAD_S", 0.1)
            assert await head(url, b"a") == b""
            monkeypatch.setattr(http_server, "HEAD_S", 600.0)
            await client.chat.completions.create(**CHAT)

    asyncio.run(work())


def test_health_needs_no_key():
    async def work():
        async with server(Policy(), key="right") as (_, url, _), httpx.AsyncClient() as http:
            found = await http.get(f"{url}/health")
            assert (found.status_code, found.json()) == (200, {"status": "ok"})

    asyncio.run(work())


class Endless(Policy):
    """Policy that never answers; it counts the answers that were given up."""

    def __init__(self):
        super().__init__()
        self.asked = asyncio.Event()
        self.given_up = asyncio.Event()

    async def __call__(self, ask):
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves", ["client", "session"])
def test_an_answer_that_nobody_waits_for_is_given_up(leaves, stream):
    async def work():
        policy = Endless()
        async with asyncio.timeout(120), server(policy) as (gateway, url, client):
            name = gateway.open_session()
            if leaves == "session":
                client = client.with_options(base_url=f"{url}/sessions/{name}/v1")
            waiting = asyncio.create_task(ask(client))
            await policy.asked.wait()
            if leaves == "client":
                waiting.cancel()
            else:
                gateway.close_session(name)
                with pytest.raises(openai.APIError, match="the session has ended"):
                    await waiting
            await policy.given_up.wait()

    async def ask(client):
        answer = await client.chat.completions.create(**CHAT, stream=stream)
        return [chunk async for chunk in answer]

    asyncio.run(work())


def test_an_idle_session_is_forgotten_and_a_busy_one_is_not(monkeypatch):
    monkeypatch.setattr(sessions, "time", Clock)
    Clock.ahead += 3600.0

    async def work():
        policy = Held()
        async with server(policy, limits={"session_s": 3600.0}) as (gateway, url, client):
            idle, used, busy = (gateway.open_session() for _ in range(3))
            own = client.with_options(base_url=f"{url}/sessions/{busy}/v1")
            waiting = asyncio.create_task(own.chat.completions.create(**CHAT))
            asked = asyncio.create_task(policy.asked.wait())
            await asyncio.wait([waiting, asked], return_when=asyncio.FIRST_COMPLETED)
            assert not waiting.done(), await waiting
            for _ in range(3):
                Clock.ahead += 3000.0
                gateway.capture(used)
            with pytest.raises(ApiError, match="had no request for 3600 s"):
                gateway.capture(idle)
            policy.let_go.set()
            await waiting
            assert gateway.capture(busy).turns == 1

    asyncio.run(work())


def test_errors_are_those_of_openais_client():
    async def work():
        async with server(Policy(), key="right") as (_, url, client):
            models = await client.models.list()
            assert [model.id for model in models.data] == ["policy"]
            with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
                await client.chat.completions.create(model="other", messages=MESSAGES)
            with pytest.raises(openai.BadRequestError, match="n is 99: "):
                await client.chat.completions.create(**CHAT, n=99)
            wrong = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
            with pytest.raises(openai.AuthenticationError, match="API key is wrong"):
                await wrong.models.list()
            await wrong.close()

    asyncio.run(work())


def test_sessions_are_opened_read_and_closed():
    async def work():
        async with (
            server(Policy(["plain"]), limits={"sessions": 1}) as (_, url, client),
            httpx.AsyncClient() as http,
        ):
            opened = (await http.post(f"{url}/sessions")).json()
            full = await http.post(f"{url}/sessions")
            assert full.json()["error"]["code"] == "too_many_sessions"
            own = client.with_options(base_url=opened["base_url"])
            answer = await own.chat.completions.create(
                **CHAT, extra_body={"return_token_ids": True}
            )
            place = f"{url}/sessions/{opened['id']}"
            found = (await http.get(place)).json()
            (sequence,) = found["sequences"]
            whole = answer.prompt_token_ids + answer.choices[0].token_ids
            assert sequence["tokens"] == whole
            assert sum(sequence["sampled"]) == len(answer.choices[0].token_ids)
            assert found["turns"] == 1
            assert (await http.delete(place)).json()["deleted"]
            assert (await http.get(place)).status_code == 404

    asyncio.run(work())


def test_a_session_has_the_ids_that_cut_answers_were_sampled_from():
    class CutPolicy(Policy):
        async def __call__(self, ask):
            assert (ask.sampling.top_p, ask.sampling.top_k, ask.sampling.min_p) == (0.5, 9, 0.1)
            completion = await super().__call__(ask)
            rows = [np.array([2, token, 5], dtype=np.int32) for token in completion.tokens]
            rows[0] = np.zeros(1, dtype=np.int32)
            return dataclasses.replace(completion, sampling_mask=SamplingMask.of_rows(rows))

    async def work():
        async with (
            server(CutPolicy(["plain"])) as (_, url, client),
            httpx.AsyncClient() as http,
        ):
            opened = (await http.post(f"{url}/sessions")).json()
            own = client.with_options(base_url=opened["base_url"])
            await own.chat.completions.create(
                **CHAT, top_p=0.5, extra_body={"top_k": 9, "min_p": 0.1}
            )
            found = (await http.get(f"{url}/sessions/{opened['id']}")).json()
            (sequence,) = found["sequences"]
            begin = sequence["sampled"].index(True)
            expected = [sorted([5, token]) for token in sequence["tokens"][begin + 1 :]]
            assert sequence["sampling_mask"] == [None] * (begin + 1) + expected

    asyncio.run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_loses_nothing_and_gets_the_same_answer_again(stream):
    async def work():
        policy = Held()
        async with server(policy) as (gateway, url, client):
            name = gateway.open_session()
            own = client.with_options(base_url=f"{url}/sessions/{name}/v1")
            first = asyncio.create_task(ask(own, {}))
            await policy.asked.wait()
            first.cancel()
            await asyncio.wait([first])
            policy.let_go.set()
            again = await ask(own, {"x-stainless-retry-count": "1"})
            ((_, completion),) = policy.turns
            assert gateway.capture(name).turns == 1
            fresh = await ask(own, {})
            assert len(policy.turns) == 2
            assert (again == fresh) == (completion.tokens == policy.turns[1][1].tokens)

    async def ask(client, headers):
        answer = await client.chat.completions.create(**CHAT, extra_headers=headers, stream=stream)
        if not stream:
            return answer.choices[0].message.tool_calls[0].function
        deltas = [choice.delta async for chunk in answer for choice in chunk.choices]
        return next(delta.tool_calls[0].function for delta in deltas if delta.tool_calls)

    asyncio.run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_ends_waiting_requests_with_a_typed_error(stream):
    async def work():
        policy = Held()
        async with openai.AsyncOpenAI(api_key="none", max_retries=0) as outer:
            async with serving(make_gateway(policy)) as url:
                waiting = asyncio.create_task(ask(outer.with_options(base_url=f"{url}/v1")))
                await policy.asked.wait()
            with pytest.raises(openai.APIError, match="the server is stopping"):
                await waiting

    async def ask(client):
        answer = await client.chat.completions.create(**CHAT, stream=stream)
        return [chunk async for chunk in answer]

    asyncio.run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_a_typed_error(stream):
    async def fails(ask):
        raise RunError("the generator is gone")

    async def work():
        async with server(fails) as (_, _, client):
            with pytest.raises(openai.APIError, match="the generator is gone"):
                answer = await client.chat.completions.create(**CHAT, stream=stream)
                [chunk async for chunk in answer]

    asyncio.run(work())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_other_machines_need_a_key(host):
    async def work():
        async with serving(make_gateway(Policy()), host=host):
            pass

    with pytest.raises(ConfigError, match="set TILLER_API_KEY"):
        asyncio.run(work())


def test_a_port_that_is_taken_is_refused():
    async def work():
        async with server(Policy()) as (_, url, _):
            port = int(url.rpartition(":")[2])
            with pytest.raises(ConfigError, match=f"--port {port}: .*in use"):
                async with serving(make_gateway(Policy()), port=port):
                    pass

    asyncio.run(work())
