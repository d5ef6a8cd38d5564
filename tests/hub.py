"""A Hub on the loopback address: the routes that ``huggingface_hub`` asks for."""

import hashlib
import importlib
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

TOKEN = "hf_of_the_test"
CHUNK = 10_000
"""Bytes that the server sends, and that the client writes, at once."""


@dataclass
class Repository:
    """Files by commit, and what is wrong with the repository."""

    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    access: str = "public"
    """``public``, ``gated`` or ``private``; the last two need TOKEN."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that the listing claims."""
    breaks: list[str] = field(default_factory=list)
    """How the next downloads of weights end halfway: ``close`` or ``reset``."""
    chunk_s: float = 0.0
    """Seconds between two chunks of weights."""

    def commit(self, files: dict[str, bytes], *branches: str) -> str:
        """Add a commit at ``branches``; return its hash."""
        named = [(name, hashlib.sha1(content).hexdigest()) for name, content in files.items()]
        commit = hashlib.sha1(repr(named).encode()).hexdigest()
        self.commits[commit] = files
        self.branches |= dict.fromkeys(branches or ("main",), commit)
        return commit


class Hub(ThreadingHTTPServer):
    """Server with ``repositories`` by name. ``asked`` has the files that were sent, in order."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        self.calls = 0
        """Number of requests, of whatever kind."""

    def add(self, name: str, files: dict[str, bytes], **options) -> str:
        """Add a repository; return its commit."""
        self.repositories[name] = repository = Repository(**options)
        return repository.commit(files)

    def variables(self, home: Path) -> dict[str, str]:
        """Return the variables with which a program uses this Hub, and the cache in ``home``."""
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), **quiet}


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """Yield a Hub that answers until the block ends."""
    with Hub() as hub:
        thread = Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


@pytest.fixture
def hub(tmp_path) -> Iterator[Hub]:
    """A Hub that this process uses, with an empty cache in ``tmp_path / "hf"``."""
    with serving_hub() as hub, pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
            patch.delenv(name, raising=False)
        for name, value in hub.variables(tmp_path / "hf").items():
            patch.setenv(name, value)
        reread()
        patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        yield hub
    reread()


def reread() -> None:
    """Have ``huggingface_hub`` read its environment variables again."""
    importlib.reload(constants)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, as a repository has them."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.calls += 1
        path = self.path.partition("?")[0]
        route = r"(/api/models)?/([^/]+/[^/]+)(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?"
        found = re.fullmatch(route, path)
        repository = self.server.repositories.get(found[2]) if found else None
        knows = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.access == "private" and not knows):
            self._refuse(401, "RepoNotFound")
            return
        revision = found[4] or "main"
        commit = repository.branches.get(revision, revision)
        files = repository.commits.get(commit)
        if files is None:
            self._refuse(404, "RevisionNotFound")
        elif found[3] == "tree":
            self._send_json([_entry(repository, *each) for each in files.items()])
        elif found[3] != "resolve":
            self._send_json({"id": found[2], "sha": commit})
        elif repository.access == "gated" and not knows:
            self._refuse(403, "GatedRepo")
        elif found[5] not in files:
            self._refuse(404, "EntryNotFound")
        else:
            self._send_file(repository, commit, found[5], files[found[5]])

    def _send_file(self, repository: Repository, commit: str, name: str, content: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.asked.append(f"{name}+{first}" if first else name)
        is_weights = name.endswith(".safetensors")
        ends = repository.breaks.pop(0) if is_weights and repository.breaks else ""
        last = (first + len(content)) // 2 if ends else len(content)
        for start in range(first, last, CHUNK):
            self.wfile.write(content[start : min(start + CHUNK, last)])
            time.sleep(repository.chunk_s if is_weights else 0)
        self.close_connection = bool(ends)
        if ends == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()

    def _send_json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def _refuse(self, code: int, reason: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", reason)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entry(repository: Repository, name: str, content: bytes) -> dict[str, object]:
    size = repository.sizes.get(name, len(content))
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": name, "size": size, "oid": oid}
