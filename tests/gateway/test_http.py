"""Errors, keys, limits and the life of the gateway's server."""

import asyncio
import contextlib
import dataclasses
import json
import threading

import httpx
import numpy as np
import openai
import pytest

from rl.errors import ConfigError, RunError
from rl.gateway import answers, protocol
from rl.gateway import gateway as gateways
from rl.gateway import http as served
from rl.gateway.http import serving
from rl.gateway.protocol import ApiError
from rl.gateway.streams import Stream
from rl.host import http_server
from rl.types.routed_experts import RoutedExperts
from rl.types.sampling_mask import SamplingMask
from tests.kit.agent_tasks import Clock
from tests.kit.agents import LONGEST, Policy, collected, make_gateway, server, session
from tests.kit.conversations import TOOL

MESSAGES = [{"role": "user", "content": "1 + 2?"}]
CHAT = {"model": "policy", "messages": MESSAGES}
OTHER = {"type": "function", "function": {"name": "other"}}
GENERATE = "/inference/v1/generate"
STREAM = pytest.mark.parametrize("stream", [False, True])


class Held(Policy):
    """Policy that answers when it is let go; it notes an answer that was given up."""

    def __init__(self):
        super().__init__(habits=["plain"])
        self.asked = asyncio.Event()
        self.let_go = asyncio.Event()
        self.given_up = asyncio.Event()

    async def __call__(self, ask):
        self.asked.set()
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.given_up.set()
            raise
        return await super().__call__(ask)


async def chat(client, **options):
    """Return the chunks of an answer, which is the only one without a stream."""
    return await collected(await client.chat.completions.create(**CHAT, **options))


def post(requests, *, policy=None, headers=None, **options):
    """Return status and JSON of each request, a path and a body, to one new server."""
    headers = {"content-type": "application/json", **(headers or {})}

    async def work():
        async with (
            server(policy or Policy(), **options) as (gateway, url, _),
            httpx.AsyncClient(timeout=60, headers=headers) as client,
        ):
            gateway.open_session("known")
            answers = []
            for path, body in requests:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                answer = await client.post(url + path, content=content)
                answers.append((answer.status_code, answer.json()))
            return answers

    return asyncio.run(work())


def sampled(**params):
    return {"token_ids": [1], "sampling_params": params}


TOOLS = ("invalid_value", "tools.0 is ")
JSON = {"type": "json_object"}
LEAST = ("invalid_value", "min_tokens is ")
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
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "web_search"}]}, 400, *TOOLS),
    ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, *TOOLS),
    ("/v1/chat/completions", CHAT | {"min_tokens": 9, "max_tokens": 8}, 400, *LEAST),
    ("/v1/chat/completions", CHAT | {"min_tokens": 9, "stop": "a"}, 400, *LEAST),
    ("/v1/chat/completions", CHAT | {"min_tokens": 9, "response_format": JSON}, 400, *LEAST),
    ("/v1/chat/completions", CHAT | {"ignore_eos": True, "response_format": JSON}, 400,
     "invalid_value", "ignore_eos is True; it does not go with response_format"),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "response_format": JSON}, 400,
     "invalid_value", "set tool_choice to 'none'"),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "xml"}}, 400,
     "invalid_value", "response_format.type is 'xml'"),
    ("/v1/chat/completions", CHAT | {"response_format": JSON | {"wat": 1}}, 400,
     "unsupported_parameter", "wat"),
    ("/v1/completions", {"prompt": "a", "response_format": JSON}, 400,
     "unsupported_parameter", "response_format"),
    ("/v1/chat/completions", CHAT | {"reasoning_effort": "low"}, 400,
     "invalid_value", "the chat template does not read reasoning_effort; leave it out"),
    ("/v1/chat/completions", CHAT | {"verbosity": "low"}, 400, "invalid_value", "verbosity"),
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
    (GENERATE, sampled(min_p=1.1), 400, "invalid_value", "min_p"),
    (GENERATE, sampled(extra_args={"session": "none"}), 404, "session_not_found", "'none'"),
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


def test_forms_that_clients_send_are_read():
    """Null for a default, -1 and other negative seeds, parameters that change nothing, and calls
    without arguments."""
    functions = [{"name": "add", "arguments": none} for none in ("", " ", "null", None)]
    call, *others = ({"id": "c", "type": "function", "function": each} for each in functions)
    told = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]}
    history = [*MESSAGES, told, {"role": "tool", "tool_call_id": "c", "content": "3"}]
    further = [*MESSAGES, told | {"tool_calls": others}]
    usage = {"stream_options": {"include_usage": None}}
    neutral = {"ignore_eos": False, "min_tokens": 0, "add_generation_prompt": True}
    requests = {
        ("/v1/completions", "cmpl-"): {"prompt": "a", "echo": None, "seed": -1},
        ("/v1/chat/completions", "chatcmpl-"): CHAT | usage | {"seed": -(2**63)},
        ("/v1/chat/completions", "chatcmpl-", "history"): CHAT | {"messages": history},
        ("/v1/chat/completions", "chatcmpl-", "further"): CHAT | neutral | {"messages": further},
        (GENERATE, "gen-"): {"token_ids": [1], "sampling_params": None},
    }
    answers = post([(path, body) for (path, *_), body in requests.items()])
    for (_, begin, *_), (status, answer) in zip(requests, answers, strict=True):
        assert status == 200, answer
        assert answer.get("id", answer.get("request_id")).startswith(begin)


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
    origins = ("http://localhost:3000", "https://evil.example")
    here, elsewhere = (post([("/sessions", b"")], headers={"origin": each})[0] for each in origins)
    assert here[0] == 200
    assert (elsewhere[0], elsewhere[1]["error"]["code"]) == (403, "wrong_origin")


async def test_a_head_that_is_too_long_or_too_slow_ends_its_connection(monkeypatch):
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

    async with server(Policy()) as (_, url, client):
        monkeypatch.setattr(http_server, "HEAD_S", 600.0)
        said = await head(url, b"a" * 2**20)
        assert b"400 Bad Request" in said or not said
        monkeypatch.setattr(http_server, "HEAD_S", 0.1)
        assert await head(url, b"a") == b""
        monkeypatch.setattr(http_server, "HEAD_S", 600.0)
        await chat(client)


@STREAM
@pytest.mark.parametrize("leaves", ["client", "session"])
async def test_an_answer_that_nobody_waits_for_is_given_up(leaves, stream):
    policy = Held()
    async with asyncio.timeout(120), server(policy) as (gateway, url, client):
        name = gateway.open_session()
        if leaves == "session":
            client = client.with_options(base_url=f"{url}/sessions/{name}/v1")
        waiting = asyncio.create_task(chat(client, stream=stream))
        await policy.asked.wait()
        if leaves == "client":
            waiting.cancel()
        else:
            gateway.close_session(name)
            with pytest.raises(openai.APIError, match="the session has ended"):
                await waiting
        await policy.given_up.wait()


async def test_an_idle_session_is_forgotten_and_a_busy_one_is_not(monkeypatch):
    monkeypatch.setattr(gateways, "time", Clock)
    Clock.ahead += 3600.0
    policy = Held()
    async with server(policy, limits={"session_s": 3600.0}) as (gateway, url, client):
        idle, used, busy = (gateway.open_session() for _ in range(3))
        own = client.with_options(base_url=f"{url}/sessions/{busy}/v1")
        waiting = asyncio.create_task(chat(own))
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


async def test_errors_are_those_of_openais_client_and_health_needs_no_key():
    async with server(Policy(), key="right") as (_, url, client), httpx.AsyncClient() as http:
        models = await client.models.list()
        assert [model.id for model in models.data] == ["policy"]
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
            await client.models.retrieve("other")
        with pytest.raises(openai.BadRequestError, match="n is 99: "):
            await chat(client, n=99)
        wrong = client.with_options(api_key="wrong")
        with pytest.raises(openai.AuthenticationError, match="API key is wrong"):
            await wrong.models.list()
        found = await http.get(f"{url}/health")
        assert (found.status_code, found.json()) == (200, {"status": "ok"})


class CutPolicy(Policy):
    """Policy whose answers have sampling masks and experts if their request cuts the
    distribution.
    """

    async def __call__(self, ask):
        completion = await super().__call__(ask)
        if not ask.sampling.is_cut:
            return completion
        assert (ask.sampling.top_p, ask.sampling.top_k, ask.sampling.min_p) == (0.5, 9, 0.1)
        rows = [np.array([2, token, 5], dtype=np.int32) for token in completion.tokens]
        rows[0] = np.zeros(1, dtype=np.int32)
        experts = np.full((len(ask.tokens) + len(rows), 1, 2), 7, dtype=np.uint8)
        masks = SamplingMask.of_rows(rows)
        return dataclasses.replace(completion, sampling_mask=masks, experts=RoutedExperts(experts))


@pytest.mark.parametrize("is_cut", [False, True])
async def test_sessions_are_opened_read_and_closed(is_cut):
    """A session has the ids that its cut answers were sampled from, and the recorded experts."""
    more = {"return_token_ids": True} | ({"top_k": 9, "min_p": 0.1, "top_p": 0.5} if is_cut else {})
    async with (
        server(CutPolicy(["plain"]), limits={"sessions": 1}) as (_, url, client),
        httpx.AsyncClient() as http,
    ):
        opened = (await http.post(f"{url}/sessions")).json()
        full = await http.post(f"{url}/sessions")
        assert full.json()["error"]["code"] == "too_many_sessions"
        own = client.with_options(base_url=opened["base_url"])
        (answer,) = await chat(own, extra_body=more)
        place = f"{url}/sessions/{opened['id']}"
        found = (await http.get(place)).json()
        (sequence,) = found["sequences"]
        tokens = answer.choices[0].token_ids
        assert sequence["tokens"] == answer.prompt_token_ids + tokens
        assert sum(sequence["sampled"]) == len(tokens)
        begin = sequence["sampled"].index(True)
        cut = [None] * (begin + 1) + [sorted([5, token]) for token in tokens[1:]]
        assert sequence.get("sampling_mask") == (cut if is_cut else None)
        experts = [[[7, 7]]] * (len(sequence["tokens"]) - 1) + [None]
        assert sequence.get("experts") == (experts if is_cut else None)
        assert found["turns"] == 1
        assert (await http.delete(place)).json()["deleted"]
        assert (await http.get(place)).status_code == 404


@STREAM
async def test_a_client_that_goes_loses_nothing_and_gets_the_same_answer_again(stream):
    async def call(headers):
        chunks = await chat(client, extra_headers=headers, stream=stream)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        parts = [choice.delta if stream else choice.message for choice in choices]
        return next(part.tool_calls[0].function for part in parts if part.tool_calls)

    policy = Held()
    async with session(policy) as (client, capture):
        first = asyncio.create_task(call({}))
        await policy.asked.wait()
        first.cancel()
        await asyncio.wait([first])
        policy.let_go.set()
        again = await call({"x-stainless-retry-count": "1"})
        ((_, completion),) = policy.turns
        assert capture.turns == 1
        fresh = await call({})
        assert len(policy.turns) == 2
        assert (again == fresh) == (completion.tokens == policy.turns[1][1].tokens)


class Busy(Held):
    """Policy that ends an answer that was given up when it is let go."""

    async def __call__(self, ask):
        try:
            return await super().__call__(ask)
        except asyncio.CancelledError:
            await self.let_go.wait()
            raise


@STREAM
@pytest.mark.parametrize("policy_type", [Held, Busy])
async def test_a_server_that_stops_ends_waiting_requests_with_a_typed_error(
    stream, policy_type, caplog
):
    policy = policy_type()
    async with openai.AsyncOpenAI(api_key="none", max_retries=0) as outer:
        async with serving(make_gateway(policy)) as url:
            client = outer.with_options(base_url=f"{url}/v1")
            waiting = asyncio.create_task(chat(client, stream=stream))
            await policy.asked.wait()
        with pytest.raises(openai.APIError, match="the server is stopping"):
            await waiting
    policy.let_go.set()
    assert "Traceback" not in caplog.text


@STREAM
async def test_an_engine_that_fails_is_a_typed_error(stream):
    async def fails(ask):
        raise RunError("the generator is gone")

    async with server(fails) as (_, _, client):
        with pytest.raises(openai.APIError, match="the generator is gone"):
            await chat(client, stream=stream)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "127.0.0.1"])
async def test_other_machines_need_a_key_and_a_port_that_is_taken_is_refused(host):
    async with server(Policy()) as (_, url, _):
        port = int(url.rpartition(":")[2])
        said = f"--port {port}: .*in use" if host == "127.0.0.1" else "set TILLER_API_KEY"
        with pytest.raises(ConfigError, match=said):
            async with serving(make_gateway(Policy()), host=host, port=port):
                pass


async def test_a_large_request_holds_up_no_other(monkeypatch):
    """The text of a request is encoded in a thread, and one that no context has room for is not
    encoded at all. Requests of a session keep their order.
    """
    encoding, may_go = threading.Event(), threading.Event()
    gateway = make_gateway(Policy(["plain"]))
    render = gateway.dialect.render

    def slow(messages, *args, **options):
        if len(messages[0]["content"]) > protocol.LARGE:
            encoding.set()
            assert may_go.wait(60)
        return render(messages, *args, **options)

    monkeypatch.setattr(gateway.dialect, "render", slow)
    longest = max(map(len, gateway.dialect.tokenizer.get_vocab()))
    most = longest * LONGEST
    async with serving(gateway) as url, httpx.AsyncClient(timeout=60) as http:
        name = gateway.open_session()

        async def ask(length, path=""):
            body = {"messages": [{"role": "user", "content": "a " * (length // 2)}]}
            answer = await http.post(f"{url}{path}/v1/chat/completions", json=body)
            return answer.json()

        own = f"/sessions/{name}"
        large = asyncio.create_task(ask(protocol.LARGE + 2, own))
        assert await asyncio.to_thread(encoding.wait, 60)
        assert (await http.get(f"{url}/health")).status_code == 200
        assert (await ask(2))["choices"]
        later = asyncio.create_task(ask(2, own))
        assert (await ask(most + 2))["error"]["code"] == "context_length_exceeded"
        prompt = {"prompt": "a" * (most + 1)}
        refused = await http.post(f"{url}/v1/completions", json=prompt)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert not later.done()
        may_go.set()
        assert "error" in await large and (await later)["choices"]


async def test_large_bodies_answers_and_streams_are_worked_at_beside_the_event_loop(monkeypatch):
    gateway = make_gateway(Policy(["plain"] * 3, is_silent=True))
    monkeypatch.setattr(answers, "BYTES_OF_A_VALUE", protocol.LARGE + 1)
    in_loop = []

    def note(owner, name):
        work = getattr(owner, name)

        def noted(*args, **options):
            in_loop.append((name, threading.current_thread() is threading.main_thread()))
            return work(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    note(gateways, "read")
    note(served, "_records_of")
    note(gateways.Capture, "answer")
    note(Stream, "chunk")
    async with serving(gateway) as url, httpx.AsyncClient(timeout=60) as http:
        opened = (await http.post(f"{url}/sessions")).json()
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        body["user"] = "u" * (protocol.LARGE + 1)
        streamed = await http.post(f"{opened['base_url']}/chat/completions", json=body)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (await http.get(f"{url}/sessions/{opened['id']}")).json()["turns"] == 1
    assert {name for name, _ in in_loop} == {"read", "_records_of", "answer", "chunk"}
    assert not [name for name, is_in_loop in in_loop if is_in_loop]
