"""The HTTP side of a gateway: routes, keys, limits, server-sent events."""

import asyncio
import contextlib
import hmac
import os
import re
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import URL
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route

from rl.errors import RunError, error_text
from rl.gateway.answers import Choice, size_of
from rl.gateway.gateway import Gateway
from rl.gateway.protocol import ApiError, aside
from rl.gateway.streams import Reply, Stream, event
from rl.host.http_server import server_config
from rl.host.listening import is_loopback, listen, require_key, url_of
from rl.types import Sequence as Tokens

BODY_S = 60.0
"""Time for the body of a request to arrive."""
ALIVE_S = 10.0
"""Time between comments in a stream that waits for its answer."""
STOP_S = 2
"""Time for answers that are being sent when the server stops."""
LOCAL_ORIGIN = re.compile(r"https?://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")
"""Origins of web pages of this machine."""
RETRY = "x-stainless-retry-count"
"""Header of OpenAI's clients: number of times that a request was repeated."""

COLUMNS = ("tokens", "sampled", "logprobs", "versions")
"""Columns of a sequence that a client gets."""

Handler = Callable[[Request], Awaitable[Response]]


def make_app(gateway: Gateway | None, key: str | None, more: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the routes of ``gateway``, and ``more`` routes. With a ``key``, every request of the
    gateway needs it.
    """
    return Starlette(
        routes=[Route("/health", _health), *more, *(_routes(gateway, key) if gateway else ())],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _refused),
    )


def _routes(gateway: Gateway, key: str | None) -> list[BaseRoute]:
    checks = _Endpoints(gateway, key)
    api = [
        checks.route("/v1/models", checks.models),
        checks.route("/v1/models/{model:path}", checks.model),
        checks.route("/v1/chat/completions", partial(checks.answer, gateway.chat), "POST"),
        checks.route("/v1/responses", partial(checks.answer, gateway.responses), "POST"),
        checks.route("/v1/completions", partial(checks.answer, gateway.completions), "POST"),
        checks.route("/inference/v1/generate", partial(checks.answer, gateway.generate), "POST"),
    ]
    session = "/sessions/{session}"
    return [
        *api,
        checks.route("/sessions", checks.open_session, "POST"),
        checks.route(session, checks.read_session),
        checks.route(session, checks.close_session, "DELETE"),
        Mount(session, routes=api),
    ]


@asynccontextmanager
async def serving(
    gateway: Gateway | None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    more: Sequence[BaseRoute] = (),
    given: str = "",
) -> AsyncIterator[str]:
    """Serve ``gateway``, and ``more`` routes, while the block runs; yield the URL.

    ``port`` 0 is any free one. Raises ConfigError, which begins with ``given``, if other machines
    could reach ``host`` without a ``key``, or if the port is taken.
    """
    require_key(host, key)
    config = server_config(make_app(gateway, key, more), stop_s=STOP_S)
    with listen(host, port, given) as listener:
        server = _Server(config)
        work = asyncio.create_task(server.serve([listener]))
        try:
            while not (server.started or work.done()):
                await asyncio.sleep(0.01)
            yield url_of(listener)
        finally:
            if gateway is not None:
                gateway.stop()
            server.should_exit = True
            await work


class _Server(uvicorn.Server):
    """Server that leaves signals to its program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield


def admit(request: Request, key: str | None, what: str) -> None:
    """Raise ApiError unless the client may ask. ``what`` is the server in words."""
    if key is not None:
        headers = request.headers
        sent = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        # the bytes that were sent, and those of the environment
        if not hmac.compare_digest(sent.encode("latin-1"), os.fsencode(key)):
            raise ApiError(401, "the API key is wrong", code="invalid_api_key")
    elif not _is_here(request.headers.get("host") or request.url.netloc):  # a page in a browser
        message = f"this server is {what} of this machine alone"
        raise ApiError(403, message, code="wrong_host")
    elif not LOCAL_ORIGIN.fullmatch(request.headers.get("origin", "http://localhost")):
        message = "pages of other sites may not use this server"
        raise ApiError(403, message, code="wrong_origin")


@lru_cache(64)
def _is_here(host: str) -> bool:
    """Whether the header ``host`` names this machine."""
    headers = [(b"host", host.encode("latin-1"))]
    scope = {"scheme": "http", "server": None, "path": "/", "headers": headers}
    return is_loopback(URL(scope=scope).hostname or "")


async def read_body(
    request: Request, most: int, kinds: Sequence[str] = ("application/json",)
) -> bytes:
    """Return the body. Raises ApiError if it has more than ``most`` bytes, is too slow, or is of
    none of the content types ``kinds``, which no web page sends without being asked.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind not in kinds:
        message = f"content-type is {kind!r}; send {' or '.join(kinds)}"
        raise ApiError(415, message, code="invalid_content_type")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    message = f"the body has more than {most} bytes"
                    raise ApiError(413, message, code="body_too_large")
    except TimeoutError:
        message = f"the body did not arrive within {BODY_S:g} s"
        raise ApiError(408, message, code="timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended early", code="invalid_json") from None
    return bytes(body)


class _Endpoints:
    def __init__(self, gateway: Gateway, key: str | None):
        self._gateway = gateway
        self._key = key

    def route(self, path: str, handler: Handler, verb: str = "GET") -> Route:
        """Return the route of ``handler``, which answers clients that may ask."""

        async def handle(request: Request) -> Response:
            admit(request, self._key, self._gateway.model or "a gateway")
            return await handler(request)

        return Route(path, handle, methods=[verb])

    async def open_session(self, request: Request) -> Response:
        name = self._gateway.open_session()
        url = f"{request.url.scheme}://{request.url.netloc}/sessions/{name}/v1"
        return JSONResponse({"id": name, "base_url": url})

    async def read_session(self, request: Request) -> Response:
        name = request.path_params["session"]
        capture = self._gateway.capture(name)
        rows = [
            ({name: [*getattr(sequence, name)] for name in COLUMNS}, sequence.snapshot())
            for sequence in capture.log.sequences
        ]
        counts = {"turns": capture.turns, "rewritten": capture.rewritten}
        counts["malformed_calls"] = capture.malformed

        def answer() -> Response:
            sequences = [{**columns, **_records_of(snapshot)} for columns, snapshot in rows]
            return JSONResponse({"id": name, **counts, "sequences": sequences})

        return await asyncio.to_thread(answer)

    async def close_session(self, request: Request) -> Response:
        name = request.path_params["session"]
        self._gateway.close_session(name)
        return JSONResponse({"id": name, "deleted": True})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._gateway.require_model(request.path_params["model"])
        return JSONResponse(self._model())

    async def answer(self, endpoint: Callable[..., Awaitable[Reply]], request: Request) -> Response:
        """Return the answer of ``endpoint`` to a request for samples."""
        body = await read_body(request, self._gateway.limits.body_bytes)
        is_retry = request.headers.get(RETRY, "0") != "0"
        reply = await endpoint(request.path_params.get("session", ""), body, is_retry=is_retry)
        if reply.stream is not None:
            events = self._events(reply, reply.stream)
            return StreamingResponse(events, media_type="text/event-stream")
        with self._stop_as_error():
            if not reply.is_kept:
                await finish_or_cancel(reply.choices, request)
            choices = await self._choices(reply)
        size = size_of(choice.completion for choice in choices)
        return await aside(size, lambda: JSONResponse(reply.whole(choices)))

    @contextlib.contextmanager
    def _stop_as_error(self) -> Iterator[None]:
        """Raise ApiError if the block is cancelled since the server stops. An engine may take
        longer to end its samples than the server has.
        """
        try:
            yield
        except asyncio.CancelledError:
            if not self._gateway.is_stopping:
                raise
            raise ApiError(503, "the server is stopping", code="server_stopping") from None

    async def _choices(self, reply: Reply) -> list[Choice]:
        """Wait for the choices. Raises ApiError."""
        try:
            return await asyncio.shield(reply.choices)
        except asyncio.CancelledError:
            if not reply.choices.cancelled() or self._gateway.is_stopping:
                raise
            raise ApiError(404, "the session has ended", code="session_not_found") from None
        except RunError as error:
            raise ApiError(500, str(error), code="sampling_failed") from None

    async def _events(self, reply: Reply, stream: Stream) -> AsyncIterator[str]:
        try:
            with self._stop_as_error():
                while not reply.choices.done():
                    news: list[asyncio.Future[Any]] = [draft.news() for draft in reply.drafts]
                    if said := "".join(stream.events(draft.choice() for draft in reply.drafts)):
                        yield said
                    waits = asyncio.wait(
                        [reply.choices, *news], return_when=FIRST_COMPLETED, timeout=ALIVE_S
                    )
                    if not (await waits)[0]:
                        yield ": waiting\n\n"
                choices = await self._choices(reply)
            yield await aside(
                size_of(choice.completion for choice in choices),
                lambda: "".join((*stream.events(choices), *stream.end(choices))),
            )
        except ApiError as error:
            yield event(error.body)
        finally:
            if not reply.is_kept:  # without effect on a complete answer
                reply.choices.cancel()

    def _model(self) -> dict[str, Any]:
        name = self._gateway.model or "policy"
        row = {"id": name, "object": "model", "created": 0, "owned_by": "tiller"}
        return {**row, "max_model_len": self._gateway.longest}


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def finish_or_cancel(work: asyncio.Future[Any], request: Request) -> None:
    """Wait for ``work``. Cancel it if the client, which has sent its whole request, goes."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    other = asyncio.ensure_future(gone())
    try:
        await asyncio.wait([work, other], return_when=FIRST_COMPLETED)
    finally:
        other.cancel()
        if not work.done():
            work.cancel()


def _records_of(sequence: Tokens) -> dict[str, Any]:
    """Return what is recorded of the sequence:

    - The ids that each token was sampled from, null for all, if top-k, top-p or min-p cut an
      answer.
    - The experts that computed each token, by layer, null for a token without a record, if the
      generator records experts.
    """
    records: dict[str, Any] = {}
    if (mask := sequence.sampling_mask) is not None:
        sets = [mask.ids(token) for token in range(len(mask))]
        records["sampling_mask"] = [None if ids is None else ids.tolist() for ids in sets]
    if (experts := sequence.experts) is not None:
        pairs = zip(experts.ids.tolist(), experts.known, strict=True)
        records["experts"] = [ids if known else None for ids, known in pairs]
    return records


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # of a route that does not exist
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, message, code="unknown_url")
    elif not isinstance(error, ApiError):
        message = f"{request.url.path} failed: {error_text(error)}"
        error = ApiError(500, message, code="internal_error")
    return JSONResponse(error.body, error.status)
