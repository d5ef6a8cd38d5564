"""Routes of the Tinker API that list training runs and checkpoints, and change, delete and send
checkpoints.
"""

import re
import secrets
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse

from rl.tinker.checkpoints import until, when
from rl.tinker.errors import BadRequest, UserError
from rl.tinker.protocol import Seconds
from rl.tinker.server import Server
from rl.tinker.store import Record

PAGE = 1000
"""Maximum number of rows of an answer."""
URL_S = 3600
"""Time for which the URLs of an answer are valid."""
CHECKPOINT = "training_runs/{run}/checkpoints/{kind}/{name}"
LISTED = [
    ("GET", "training_runs", "training_runs"),
    ("GET", "training_runs/{run}", "training_run"),
    ("GET", "training_runs/{run}/checkpoints", "checkpoints_of"),
    ("GET", "checkpoints", "checkpoints"),
    ("DELETE", CHECKPOINT, "delete_checkpoint"),
    ("POST", f"{CHECKPOINT}/publish", "publish"),
    ("DELETE", f"{CHECKPOINT}/publish", "publish"),
    ("PUT", f"{CHECKPOINT}/ttl", "set_ttl"),
    ("GET", f"{CHECKPOINT}/external_weights_urls", "external_weights_urls"),
    ("GET", "files/{key}/{file:path}", "file"),
]
"""Verb, path and handler of each route."""


class Catalog:
    """Handlers of LISTED. Each gets the request, the parts of its path, and the fields of its
    body.
    """

    def __init__(self, server: Server):
        self._models = server.models
        self._store = server.parts.store
        self._checkpoints = server.parts.checkpoints

    def training_runs(self, request: Request) -> Any:
        ids, cursor = page(request, [*self._store.facts["model"]])
        return {"training_runs": [self.training_run(request, id) for id in ids], "cursor": cursor}

    def training_run(self, request: Request, run: str) -> Any:
        fact = self._store.get("model", run)
        last = {row["checkpoint_type"]: row for row in self._checkpoints.rows(run)}
        return {
            "training_run_id": run,
            "base_model": fact["base_model"],
            "model_owner": "local",
            **adapter_facts(fact),
            "corrupted": bool(fact["failed"]),
            "last_request_time": when(self._models.used(run)),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": fact["user_metadata"],
        }

    def checkpoints_of(self, request: Request, run: str) -> Any:
        self._store.get("model", run)
        return {"checkpoints": self._checkpoints.rows(run), "cursor": None}

    def checkpoints(self, request: Request) -> Any:
        rows, cursor = page(request, self._checkpoints.rows())
        return {"checkpoints": rows, "cursor": cursor}

    def delete_checkpoint(self, request: Request, **place: str) -> None:
        self._checkpoints.delete(self._path(**place))

    def _path(self, run: str, kind: str, name: str) -> str:
        path = f"tinker://{run}/{kind}/{name}"
        self._checkpoints.find(path)
        return path

    def _change(self, place: dict[str, str], **fields: Any) -> None:
        path = self._path(**place)
        self._store.put("checkpoint", path, self._checkpoints.find(path) | fields)

    def publish(self, request: Request, **place: str) -> None:
        self._change(place, public=request.method == "POST")

    def set_ttl(self, request: Request, *, ttl_seconds: Seconds = None, **place: str) -> None:
        self._change(place, expires=until(ttl_seconds))

    def external_weights_urls(self, request: Request, **place: str) -> Any:
        expires = time.time() + URL_S
        self._change(place, links_expire=expires)
        fact = self._checkpoints.find(self._path(**place))
        base = f"{request.base_url}api/v1/files/{fact['key']}"
        urls = {file: f"{base}/{quote(file)}" for file in self._files(fact)}
        return {"urls": urls, "expires": when(expires)}

    def _files(self, fact: Record) -> dict[str, Path]:
        folder = self._checkpoints.at(fact["folder"])
        files = (path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path for path in files}

    def file(self, request: Request, key: str, file: str) -> Any:
        now = time.time()
        for path, fact in self._store.facts["checkpoint"].items():
            is_key = secrets.compare_digest(fact["key"].encode(), key.encode())
            if is_key and fact.get("links_expire", 0.0) > now:
                files = self._files(self._checkpoints.find(path))
                if file in files:
                    return FileResponse(files[file])
        raise BadRequest(404, "there is no such file, or its URL has expired")


def adapter_facts(fact: Record) -> dict[str, Any]:
    """Return what clients are told about the adapter of a model or checkpoint."""
    rank = fact["lora"]["rank"] if fact["lora"] else None
    return {"is_lora": True, "lora_rank": rank, "optimizer_config": {"type": "adamw"}}


def page(request: Request, rows: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the rows that the query asks for, of the newest first, and their place."""
    query = request.query_params
    texts = (query.get("offset", "0"), query.get("limit", "100"))
    if not all(re.fullmatch(r"\d{1,9}", text) for text in texts):
        raise UserError("offset and limit must be numbers")
    offset, limit = int(texts[0]), min(int(texts[1]), PAGE)
    place = {"offset": offset, "limit": limit, "total_count": len(rows)}
    return rows[::-1][offset : offset + limit], place
