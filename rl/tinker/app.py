"""Routes of the Tinker API."""

import asyncio
import contextlib
import hashlib
import inspect
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl.errors import RunError
from rl.gateway.http import admit, finish_or_cancel, read_body
from rl.gateway.protocol import ApiError, aside
from rl.tinker.catalog import LISTED, Catalog, adapter_facts, page
from rl.tinker.checkpoints import until
from rl.tinker.errors import BadRequest, UserError
from rl.tinker.graph import Graph
from rl.tinker.protocol import (
    Client,
    Lora,
    LossInput,
    Metadata,
    Number,
    Optimizer,
    Positive,
    Seconds,
    Text,
    read,
    sample_head,
)
from rl.tinker.server import Server
from rl.tinker.store import Accepted, Answer, Record
from rl.tinker.wire import MEDIA_TYPE, parse_forward_backward
from rl.tinker.wire import read_body as decoded

LONG_POLL_S = 30.0
"""Time that a request for a result waits for it. The SDK gives up after 45 s."""
MAX_BODY = 64 * 2**20
"""Maximum size of a body."""
INLINE = 2**20
"""Size of a result that a client gets without being told the size first."""
COPIES = "it holds copies of checkpoints; create a model from one of them"
FIXED = {
    "client/config": {
        "parallel_fwdbwd_chunks": True,
        "proto_compress_fwdbwd": True,
        "fwdbwd_max_chunk_len": 1024,
        "fwdbwd_max_chunk_bytes_count": 5_000_000,
        "sample_use_retrieve_futures": True,
        "sample_dispatch_bytes_semaphore_size": 16 * 1024,
        "custom_loss_server_side": True,
        "sample_join_sampling_session": True,
    },
    "client/dynamic_config": {"refresh_interval_sec": 300, "sample_cancel_enabled": True},
    "telemetry": {"status": "accepted"},
    "healthz": {"status": "ok"},
}
"""Answers that are the same for all clients, by path. The first has ways of the SDK, which the
server chooses; the size of samples that are sent at once bounds the number of connections."""
POSTED = """asample retrieve_future retrieve_futures forward_backward optim_step create_session
    session_heartbeat create_model get_info create_custom_loss load_weights save_weights
    save_weights_for_sampler save_weights_external weights_info copy_weights
    create_sampling_session join_sampling_session cancel_future"""
"""Paths of POST, each of the handler with its name; those first that come for every sample."""
OTHERS = [
    ("GET", "get_server_capabilities", "capabilities"),
    ("GET", "sessions", "sessions"),
    ("GET", "sessions/{session}", "session"),
    ("POST", "sessions/{session}/finish", "finish"),
    ("GET", "samplers/{sampler}", "sampler"),
    *(("GET" if path == "healthz" else "POST", path, "fixed") for path in FIXED),
]
"""Verb, path and handler of the other routes of this module."""


def routes_of(server: Server, key: str | None) -> list[Route]:
    """Return the routes of ``server``. With a ``key``, requests need it."""
    posted = [("POST", path, path) for path in POSTED.split()]
    return [
        Route(f"/api/v1/{path}", _endpoint(server, key, getattr(owner, name)), methods=[verb])
        for owner, rows in ((_Handlers(server), [*posted, *OTHERS]), (Catalog(server), LISTED))
        for verb, path, name in rows
    ]


def _endpoint(
    server: Server, key: str | None, handler: Callable[..., Any]
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that checks the body. What the client is told is on disk."""

    async def handle(request: Request) -> Response:
        if "key" not in request.path_params:  # of a file, whose URL is the key
            admit(request, key, "a Tinker server")
        request.state.body = b""
        if request.method not in ("GET", "DELETE"):
            kinds = ("application/json", MEDIA_TYPE)
            request.state.body = await read_body(request, MAX_BODY, kinds)
        try:
            if request.method != "GET":
                server.parts.store.require_written()
            arguments = {}
            if handler.__name__ not in ("forward_backward", "asample", "fixed"):
                body, whole = request.state.body, handler.__name__ != "_in_order"
                arguments = await aside(len(body), lambda: read(handler, body, whole=whole))
            answer = handler(request, **request.path_params, **arguments)
            if inspect.isawaitable(answer):
                work = asyncio.ensure_future(answer)
                await finish_or_cancel(work, request)
                if not work.done():  # the client has gone
                    return Response(status_code=499)
                answer = work.result()
            await server.parts.store.flush()
        except UserError as error:
            raise ApiError(400, str(error), code="invalid_value") from None
        except BadRequest as error:
            raise ApiError(error.status, str(error), code="refused") from None
        except RunError as error:
            raise ApiError(503, str(error), code="storage_failed") from None
        if answer is None:
            return Response(status_code=204)
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    return handle


class _Handlers:
    """Handlers of routes. Each gets the request, the parts of its path, and the fields of its body;
    it returns JSON, a response, or None for no content.
    """

    def __init__(self, server: Server):
        self._server = server
        self._store = server.parts.store
        self._facts = server.parts.store.facts
        self._futures = server.parts.futures
        self._checkpoints = server.parts.checkpoints

    # The server and its sessions.

    def fixed(self, request: Request) -> Any:
        return FIXED[request.url.path.removeprefix("/api/v1/")]

    def capabilities(self, request: Request) -> Any:
        longest = self._server.parts.longest
        facts = {"max_context_length": longest, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **facts} for name in self._server.names]}

    def create_session(
        self, request: Request, *, user_metadata: Metadata = None, display_name: Text | None = None
    ) -> Any:
        id = self._session(request, user_metadata=user_metadata, display_name=display_name)
        return {"session_id": id, "type": "create_session"}

    def _session(self, request: Request, **facts: Any) -> str:
        """Return the id of a new session, or that of the same request before."""
        key = request.headers.get("x-idempotency-key") or secrets.token_hex()
        id = f"sess-{hashlib.blake2b(key.encode(), digest_size=10).hexdigest()}"
        if id not in self._facts["session"]:
            self._store.put("session", id, {**facts, "finished": None})
            self._server.samplers.hear(id)
        return id

    def session_heartbeat(self, request: Request, *, session_id: Text) -> Any:
        if self._store.get("session", session_id)["finished"]:
            raise BadRequest(410, "the session has finished")
        self._server.samplers.hear(session_id)
        return {"type": "session_heartbeat"}

    def finish(self, request: Request, session: str, *, reason: Metadata) -> None:
        fact = self._store.get("session", session)
        reason = fact["finished"] or reason or {"type": "unknown"}
        self._store.put("session", session, fact | {"finished": reason})
        self._server.samplers.give_up(session)
        self._server.finish(session)

    def sessions(self, request: Request) -> Any:
        return {"sessions": page(request, [*self._facts["session"]])[0]}

    def session(self, request: Request, session: str) -> Any:
        fact = self._store.get("session", session)
        runs, samplers = (
            [id for id in self._facts[kind] if id.startswith(f"{session}:")]
            for kind in ("model", "sampler")
        )
        labels = {name: fact.get(name) for name in ("user_metadata", "display_name")}
        return {"training_run_ids": runs, "sampler_ids": samplers, **labels}

    # Training.

    def create_model(
        self,
        request: Request,
        *,
        session_id: Text,
        model_seq_id: Number,
        base_model: Text,
        user_metadata: Metadata = None,
        lora_config: Lora | None = None,
        optimizer_config: Optimizer | None = None,
    ) -> Any:
        return self._create(request, session_id, model_seq_id, base_model, user_metadata)

    def _create(
        self, request: Request, session: str, number: int, base: str | None, metadata: Metadata
    ) -> Any:
        self._store.get("session", session)
        fact = {"session": session, "base_model": self._base(base), "user_metadata": metadata}
        verb = request.url.path.rpartition("/")[2]
        id = f"{session}:train:{number}"
        return self._server.models.create(id, verb, request.state.body, **fact)

    def _base(self, name: str | None) -> str:
        if name not in self._server.names:
            raise UserError(f"base_model is {name!r}; it must be one of {self._server.names}")
        return name

    def load_weights(
        self,
        request: Request,
        *,
        path: Text,
        optimizer: bool,
        model_id: Text = "",
        seq_id: Number = 0,
        session_id: Text = "",
        model_seq_id: Number = 0,
        base_model: Text | None = None,
        user_metadata: Metadata = None,
        optimizer_config: Optimizer | None = None,
    ) -> Any:
        if not session_id:
            return self._in_order(request, model_id=model_id, seq_id=seq_id)
        checkpoint = self._facts["checkpoint"].get(path, {"base_model": self._server.names[0]})
        base = base_model or checkpoint["base_model"]
        return self._create(request, session_id, model_seq_id, base, user_metadata)

    def _in_order(self, request: Request, *, model_id: Text, seq_id: Positive) -> Any:
        verb = request.url.path.rpartition("/")[2]
        return self._server.models.accept(model_id, seq_id, verb, request.state.body)

    optim_step = save_weights = save_weights_for_sampler = save_weights_external = _in_order

    async def forward_backward(self, request: Request) -> Any:
        encoding = request.headers.get("content-encoding", "")
        sent = request.state.body

        def parse() -> tuple[Any, bytes]:
            head = parse_forward_backward(decoded(sent, encoding, MAX_BODY))
            return head, head.SerializeToString(deterministic=True)  # repeated ones are compared

        head, body = await aside(len(sent), parse)
        verb = "forward" if head.forward_only else "forward_backward"
        if head.seq_id < 1:
            raise UserError("seq_id must be at least 1")
        return self._server.models.accept(head.model_id, head.seq_id, verb, body)

    def create_custom_loss(
        self,
        request: Request,
        *,
        session_id: Text,
        custom_loss_seq_id: Number,
        inputs: list[LossInput],
        graph: dict[str, Any],
    ) -> Any:
        self._store.get("session", session_id)
        id = f"{session_id}:loss:{custom_loss_seq_id}"
        digest = self._futures.require_same(f"{id}:0", request.state.body)
        fact: Record = {"graph": graph, "inputs": [spec.model_dump() for spec in inputs]}
        answer = Answer.of(loss_id=id, type="create_custom_loss")
        try:
            Graph.of(**fact)
            self._store.put("loss", id, fact)
        except UserError as error:
            answer = Answer.failure(str(error), "user")
        self._store.accept(id, Accepted(0, "create_custom_loss"), digest)
        self._store.answer(id, 0, answer)
        return {"request_id": f"{id}:0"}

    def get_info(self, request: Request, *, model_id: Text) -> Any:
        fact = self._store.get("model", model_id)
        name = fact["base_model"]
        data = {"arch": "tiller", "model_name": name}
        return {"model_id": model_id, "model_data": data, "model_name": name, **adapter_facts(fact)}

    # Results.

    async def retrieve_future(
        self, request: Request, *, request_id: Text, allow_metadata_only: bool = False
    ) -> Any:
        owner, _, number = request_id.rpartition(":")
        seq = int(number) if re.fullmatch(r"\d{1,16}", number) else -1
        if future := self._futures.get(request_id):
            with contextlib.suppress(TimeoutError), self._server.samplers.listener(owner):
                async with asyncio.timeout(LONG_POLL_S):
                    await future.known.wait()
            if future.answer is None:
                again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
                return JSONResponse(again, status_code=408)
        answer = future.answer if future else await self._store.answered(owner, seq)
        size = len(answer.content) if answer is not None else 0
        if allow_metadata_only and size > INLINE:
            return {"status": "complete_metadata", "response_payload_size": size}
        self._server.samplers.fetched(owner, seq)
        if answer is None or answer.media == "lost":
            raise BadRequest(410, f"there is no request {request_id!r}, or its result was lost")
        return Response(answer.content, media_type=answer.media)

    async def retrieve_futures(
        self,
        request: Request,
        *,
        target: Client,
        prev_cursor: Number = 0,
        timeout: float | None = None,
        retrieved_request_ids: list[Text] | None = None,
    ) -> Any:
        for id in retrieved_request_ids or ():
            self._futures.forget(id)
        seconds = LONG_POLL_S if timeout is None else min(timeout, LONG_POLL_S)
        rows, cursor = await self._server.samplers.ready_after(
            target.sampling_session_id,
            target.cloned_sampler_id,
            cursor=prev_cursor,
            seconds=seconds,
        )
        return {"completions": rows, "cursor": cursor}

    def cancel_future(self, request: Request, *, request_id: Text) -> None:
        future = self._futures.get(request_id)
        if future is not None and future.task is not None:
            future.task.cancel()

    # Sampling.

    def create_sampling_session(
        self,
        request: Request,
        *,
        session_id: Text,
        sampling_session_seq_id: Number,
        base_model: Text | None = None,
        model_path: Text | None = None,
    ) -> Any:
        self._store.get("session", session_id)
        id = f"{session_id}:sample:{sampling_session_seq_id}"
        base = "" if model_path else self._base(base_model)
        self._server.samplers.create(id, base, model_path)
        return {"sampling_session_id": id, "type": "create_sampling_session"}

    def sampler(self, request: Request, sampler: str) -> Any:
        fact = self._server.samplers.fact(sampler)
        model = {name: fact[name] for name in ("base_model", "model_path")}
        return {"sampler_id": sampler, **model}

    def join_sampling_session(self, request: Request, *, sampling_session_id: Text) -> Any:
        return {"client_counter": self._server.samplers.join(sampling_session_id)}

    async def asample(self, request: Request) -> Any:
        body = request.state.body
        head = await aside(len(body), lambda: read(sample_head, body, whole=False))
        promise = self._server.samplers.ask(body, *head.values())
        try:
            await self._store.flush()
        except asyncio.CancelledError:  # the client has gone without its promise
            self._server.samplers.give_up(promise["request_id"])
            raise
        return promise

    # Checkpoints.

    def weights_info(self, request: Request, *, tinker_path: Text) -> Any:
        fact = self._checkpoints.find(tinker_path)
        return {"base_model": fact["base_model"], **fact["lora"], **adapter_facts(fact)}

    def copy_weights(
        self,
        request: Request,
        *,
        source_path: Text,
        session_id: Text = "",
        model_seq_id: Number = 0,
        ttl_seconds: Seconds = None,
    ) -> Any:
        source = self._checkpoints.find(source_path)
        session = session_id or self._session(request)
        self._store.get("session", session)
        id = f"{session}:train:{model_seq_id}"
        path = f"tinker://{id}/{'/'.join(source_path.split('/')[-2:])}"
        if path not in self._facts["checkpoint"]:
            copied = {"model": id, "public": False, "expires": until(ttl_seconds)}
            self._store.put("checkpoint", path, source | copied)
            fact = {"base_model": source["base_model"], "user_metadata": None, "failed": COPIES}
            self._server.models.create(id, "load_weights", b"", session=session, **fact)
        return {"tinker_path": path}
