"""HTTP side of the pages: files of the page, JSON of the runs, and the key."""

import hashlib
import hmac
import json
import os
import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rl.errors import error_text
from rl.host.http_server import server_config
from rl.host.listening import is_loopback, listen, url_of
from rl.view.run import POINTS, Run

PAGE = Path(__file__).with_name("page")
COOKIE = "tiller_view_key"
KEY_BYTES = 4_096
"""Most bytes of the form with the key."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
LOGIN = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>Tiller</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="/style.css"><body class="login"><form method="post" action="/key">
<p class="bad" role="alert"></p><label>Key (TILLER_API_KEY of the server)
<input type="password" name="key" autofocus></label>
<button>Open</button></form></body></html>
"""
WRONG = "This key is wrong. Give the value of TILLER_API_KEY that the server was started with."


def answer(runs: Sequence[Run], name: str, query: dict[str, str]) -> dict[str, Any]:
    """Return the answer to ``/api/name?query``.

    Raises LookupError for a run or a name that does not exist, and ValueError for a query that is
    no number.
    """
    if name == "runs":
        return {
            "runs": [{"name": run.name, "folder": str(run.folder.absolute())} for run in runs],
            "exported": None,
        }
    number = int(query.get("run", "0"))
    if not 0 <= number < len(runs):
        raise LookupError(f"there is no run {number}; there are {len(runs)}")
    run = runs[number]

    def given(field: str, default: int = 0) -> int:
        number = int(query.get(field, default))
        if abs(number) >= 2**53:
            raise ValueError(f"{field} is too large")
        return number

    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "state": run.state,
        "curves": lambda: run.curves(query.get("names", "").split(","), given("points", POINTS)),
        "timeline": lambda: run.timeline(given("step"), given("count", 1)),
        "table": lambda: run.rollouts.table(given("step")),
        "rollout": lambda: run.rollouts.rollout(given("step"), given("index")),
        "evaluations": run.evaluations,
        "changes": lambda: run.changes(given("before"), given("after")),
        "example": lambda: run.evaluated.rollout(given("step"), given("index")),
        "failure": run.failure,
        "config": run.config,
    }
    if name not in answers:
        raise LookupError(f"there is no /api/{name}")
    return answers[name]()


def make_app(runs: Sequence[Run], key: str | None = None) -> Starlette:
    """Return the routes of the pages of ``runs``. With a ``key``, every request needs it, as a
    bearer token or in the cookie that the form of the key sets.
    """

    async def guard(request: Request, answer: RequestResponseEndpoint) -> Response:
        refusal = None if request.url.path == "/key" else _refusal(request, key)
        response = refusal or await answer(request)
        response.headers.update(HEADERS)
        return response

    async def data(request: Request) -> Response:
        name = request.path_params["name"]
        query = dict(request.query_params)
        try:
            content = await run_in_threadpool(answer, runs, name, query)
        except LookupError as error:
            return _json({"error": str(error.args[0])}, 404)
        except (ValueError, OverflowError) as error:
            return _json({"error": error_text(error)}, 400)
        return _json(content)

    async def profile(request: Request) -> Response:
        run, step, file = request.path_params.values()
        if re.fullmatch("[0-9]{1,9}/[0-9]{1,15}", f"{run}/{step}"):
            folders = [chosen_run.profile(int(step)) for chosen_run in runs[int(run) :][:1]]
            for path in chain.from_iterable(folder.glob("*") for folder in folders):
                if path.name == file and path.is_file():
                    return FileResponse(path, headers={"content-encoding": "identity"})
        raise HTTPException(404)

    async def enter(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > KEY_BYTES:
                raise HTTPException(413)
        sent_key = parse_qs(body.decode(errors="replace")).get("key", [""])[0]
        if key is None or _is_equal(sent_key, key):
            response: Response = RedirectResponse("/", 303)
            if key is not None:
                response.set_cookie(COOKIE, _cookie_of(key), httponly=True, samesite="strict")
        else:
            response = _login(WRONG)
        return response

    return Starlette(
        routes=[
            Route("/api/{name}", data),
            Route("/profiles/{run}/{step}/{file}", profile),
            Route("/key", enter, methods=["POST"]),
            Mount("/", StaticFiles(directory=PAGE, html=True)),
        ],
        middleware=[
            Middleware(GZipMiddleware, minimum_size=4_096, compresslevel=3),
            Middleware(BaseHTTPMiddleware, dispatch=guard),
        ],
    )


def serve(runs: Sequence[Run], host: str, port: int, key: str | None) -> None:
    """Serve the pages until a signal. Raises ConfigError if the address cannot be used."""
    config = server_config(make_app(runs, key), stop_s=1)
    with listen(host, port) as listener:
        print(f"{url_of(listener)}/", flush=True)
        uvicorn.Server(config).run(sockets=[listener])


def to_json(content: Any) -> bytes:
    """Return JSON in ASCII, which lone surrogates survive."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False, default=str).encode()


def _json(content: Any, status: int = 200) -> Response:
    return Response(to_json(content), status, media_type="application/json")


def _refusal(request: Request, key: str | None) -> Response | None:
    """Return the answer to a client that may not read; None if the client may."""
    if key is None:
        if is_loopback(request.url.hostname or ""):
            return None
        return PlainTextResponse("this server answers to its own machine alone\n", 403)
    header = request.headers.get("authorization", "").removeprefix("Bearer ")
    sent_key = header.encode("latin-1").decode(errors="replace")  # the bytes that were sent
    cookie = request.cookies.get(COOKIE, "")
    if _is_equal(sent_key, key) or _is_equal(cookie, _cookie_of(key)):
        return None
    if request.url.path == "/":
        return _login(WRONG if sent_key or cookie else "")
    if request.url.path == "/style.css":
        return None
    if sent_key or cookie:
        return PlainTextResponse(f"{WRONG}\n", 401)
    return PlainTextResponse("send the key as Authorization: Bearer KEY\n", 401)


def _login(message: str) -> Response:
    return Response(LOGIN.replace("></p>", f">{message}</p>"), 401, media_type="text/html")


def _cookie_of(key: str) -> str:
    """Return the value of the cookie of clients that gave ``key``; ASCII, unlike some keys."""
    return hashlib.sha256(os.fsencode(key)).hexdigest()


def _is_equal(sent: str, key: str) -> bool:
    return hmac.compare_digest(sent.encode(), os.fsencode(key))
