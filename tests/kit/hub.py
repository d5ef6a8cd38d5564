"""A Hub on the loopback address: the routes that ``huggingface_hub`` and ``datasets`` ask for."""

import hashlib
import importlib
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.kit.servers import Handler, Server, serving

TOKEN = "hf_of_the_test"
CHUNK = 10_000
"""Bytes that the server sends, and that the client writes, at once."""
ROUTE = re.compile(
    r"/(?:api/models/|api/(?=datasets/))?((?:datasets/)?[^/]+/[^/]+)"
    r"(?:/(revision|tree|paths-info|resolve)/([^/]+)/?(.*))?"
)


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


class Hub(Server):
    """Server of repositories. ``asked`` has the files that were sent, in order."""

    daemon_threads = True

    def __init__(self):
        super().__init__(_Handler)
        self.repositories: dict[str, Repository] = {}
        """Repositories by name. The name of a dataset begins with ``datasets/``."""
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
def using_hub(home: Path) -> Iterator[Hub]:
    """Yield a Hub that this process uses, with an empty cache in ``home``."""
    with serving(Hub()) as hub, pytest.MonkeyPatch.context() as patch:
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
            patch.delenv(name, raising=False)
        for name, value in hub.variables(home).items():
            patch.setenv(name, value)
        reread()
        patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        yield hub
    reread()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A Hub that this process uses, with an empty cache in ``tmp_path / "hf"``."""
    with using_hub(tmp_path / "hf") as hub:
        yield hub


@pytest.fixture
def variable() -> Iterator[Callable[[str, str], None]]:
    """Function that sets a variable of ``huggingface_hub`` and ``datasets``."""
    with pytest.MonkeyPatch.context() as patch:

        def put(name: str, value: str) -> None:
            patch.setenv(name, value)
            reread()

        yield put
    reread()


def reread() -> None:
    """Have ``huggingface_hub`` and ``datasets`` read their environment variables again."""
    from datasets import config  # most tests do not import this package

    importlib.reload(constants)
    importlib.reload(config)
    config.USE_PARQUET_EXPORT = False  # another host of the Hub has it


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, as a repository has them."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class _Handler(Handler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET(json.loads(body)["paths"])

    def do_GET(self, paths: tuple[str, ...] = ()) -> None:
        self.server.calls += 1
        found = ROUTE.fullmatch(self.path.partition("?")[0].replace("%2F", "/"))
        name, verb, revision, path = found.groups() if found else ("", None, None, None)
        repository = self.server.repositories.get(name)
        knows = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.access == "private" and not knows):
            self._refuse(401, "RepoNotFound")
            return
        commit = repository.branches.get(revision or "main", revision)
        files = repository.commits.get(commit)
        if files is None:
            self._refuse(404, "RevisionNotFound")
        elif verb == "tree":
            inside = [each for each in files if each.startswith(path)]
            self._send_json([_entry(repository, each, files[each]) for each in inside])
        elif verb == "paths-info":
            known = [each for each in paths if each in files]
            self._send_json([_entry(repository, each, files[each]) for each in known])
        elif verb != "resolve":
            self._send_json({"id": name.removeprefix("datasets/"), "sha": commit})
        elif repository.access == "gated" and not knows:
            self._refuse(403, "GatedRepo")
        elif path not in files:
            self._refuse(404, "EntryNotFound")
        else:
            self._send_file(repository, commit, path, files[path])

    def _send_file(self, repository: Repository, commit: str, name: str, content: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        end = min(int(asked[2]) + 1, len(content)) if asked and asked[2] else len(content)
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
        if asked:
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
        self._begin(206 if asked else 200, end - first, headers)
        if self.command == "HEAD":
            return
        self.server.asked.append(f"{name}+{first}" if first else name)
        is_weights = name.endswith(".safetensors")
        breaks = repository.breaks.pop(0) if is_weights and repository.breaks else ""
        last = (first + end) // 2 if breaks else end
        for start in range(first, last, CHUNK):
            self.wfile.write(content[start : min(start + CHUNK, last)])
            time.sleep(repository.chunk_s if is_weights else 0)
        self.close_connection = bool(breaks)
        if breaks == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()

    def _send_json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self._begin(200, len(body), {})
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def _refuse(self, code: int, reason: str) -> None:
        self._begin(code, 0, {"X-Error-Code": reason})

    def _begin(self, code: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def _entry(repository: Repository, name: str, content: bytes) -> dict[str, object]:
    size = repository.sizes.get(name, len(content))
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": name, "size": size, "oid": oid}
