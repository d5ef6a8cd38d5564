"""A Hub on the loopback address: the routes that ``huggingface_hub`` and ``datasets`` ask for."""

import hashlib
import importlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import datasets.config
import pytest
from huggingface_hub import constants

TOKEN = "hf_of_the_test"
ROUTE = re.compile(
    r"/(?:api/)?(models|datasets)/([^/]+/[^/]+?)(?:/(revision|tree|paths-info|resolve)/([^/]+)/?(.*))?"
)


class Hub(ThreadingHTTPServer):
    """Server of the commits of repositories, each the files by their names, the newest last."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[tuple[str, str], list[dict[str, bytes]]] = {}
        """Commits by kind (``datasets`` or ``models``) and name."""
        self.gated: set[str] = set()
        """Names of repositories whose files need TOKEN."""
        self.downloads: list[str] = []
        """Names of the files that were sent."""

    def commit(self, name: str, files: dict[str, bytes], kind: str = "datasets") -> str:
        """Add a commit to a repository, and return its hash."""
        self.repositories.setdefault((kind, name), []).append(files)
        return hash_of(files)


def hash_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


@contextmanager
def serving_hub(home: Path) -> Iterator[Hub]:
    """Yield a Hub that this process uses, with an empty cache in ``home``."""
    with Hub() as hub, pytest.MonkeyPatch.context() as patch:
        thread = Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        patch.setenv("HF_HOME", str(home))
        patch.setenv("NO_PROXY", "*")
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        _reread()
        yield hub
        hub.shutdown()
        thread.join()
    _reread()


@contextmanager
def offline() -> Iterator[None]:
    """Have both packages use their caches alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        _reread()
        yield
    _reread()


def _reread() -> None:
    """Have both packages read their environment variables again."""
    importlib.reload(constants)
    importlib.reload(datasets.config)
    datasets.config.USE_PARQUET_EXPORT = False  # another host of the Hub has it


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.do_GET(json.loads(body)["paths"] if body.startswith("{") else [])

    def do_GET(self, paths=()) -> None:
        found = ROUTE.fullmatch(self.path.partition("?")[0].replace("%2F", "/"))
        kind, name, verb, revision, path = found.groups() if found else (None,) * 5
        commits = self.server.repositories.get((kind, name))
        if commits is None:
            self._refuse(401, "RepoNotFound")
        elif not (files := _files(commits, revision or "main")):
            self._refuse(404, "RevisionNotFound")
        elif verb == "tree":
            inside = [each for each in files if each.startswith(path)]
            self._send_json([_entry(each, files[each]) for each in inside])
        elif verb == "paths-info":
            self._send_json([_entry(each, files[each]) for each in paths if each in files])
        elif verb != "resolve":
            self._send_json({"id": name, "sha": hash_of(files)})
        elif name in self.server.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(403, "GatedRepo")
        elif path not in files:
            self._refuse(404, "EntryNotFound")
        else:
            self._send_file(files, path)

    def _send_file(self, files: dict[str, bytes], path: str) -> None:
        content = files[path]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        part = content[first : int(asked[2]) + 1 if asked and asked[2] else None]
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", hash_of(files))
        self.send_header("Content-Length", str(len(part)))
        if asked:
            end = first + len(part) - 1
            self.send_header("Content-Range", f"bytes {first}-{end}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self.server.downloads.append(path)
            self.wfile.write(part)

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


def _files(commits: list[dict[str, bytes]], revision: str) -> dict[str, bytes]:
    if revision == "main":
        return commits[-1]
    return next((files for files in commits if hash_of(files) == revision), {})


def _entry(path: str, content: bytes) -> dict[str, object]:
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": oid}
