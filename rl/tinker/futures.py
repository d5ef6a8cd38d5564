"""Promises of results, and results that clients have not fetched yet."""

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any

from rl.tinker.errors import BadRequest
from rl.tinker.store import Answer

MAX_BYTES = 2**29
"""Size of the results that are kept in memory."""
MAX_DIGESTS = 2**18
"""Number of latest requests that a request with the same id is compared with."""
OVERHEAD = 1000
"""Size of a result beside its content."""


@dataclass(eq=False)
class Future:
    """Result of a request, once it is known."""

    promise: dict[str, Any]
    """JSON object that a client gets at once."""
    answer: Answer | None = None
    task: asyncio.Task[None] | None = None
    """Work that makes the result, if it may be cancelled."""
    known: asyncio.Event = field(default_factory=asyncio.Event)


class Futures:
    """Futures by the ids of their requests. The oldest results make room for new ones. ::

    future = futures.open("sess-1:sample:0:1", sample_sequence_ids=ids)
    futures.resolve(future, Answer.of(path="tinker://..."))
    futures.get("sess-1:sample:0:1").answer
    """

    def __init__(self) -> None:
        self._all: dict[str, Future] = {}
        self.digests: dict[str, bytes] = {}
        """Digests of requests, with which later requests of the same ids are compared."""
        self._done: dict[str, int] = {}  # sizes
        self._bytes = 0

    @property
    def pending(self) -> int:
        """Number of futures without an answer."""
        return len(self._all) - len(self._done)

    def get(self, id: str) -> Future | None:
        """Return a future; None if it is unknown, or was forgotten."""
        return self._all.get(id)

    def require_same(self, id: str, content: bytes) -> bytes:
        """Return the digest of the request ``id``. Raises BadRequest if the request has come with
        other content.
        """
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if self.digests.setdefault(id, digest) != digest:
            problem = f"request {id} has come before with other content"
            raise BadRequest(400, f"{problem}; another client uses the same ids and numbers")
        while len(self.digests) > MAX_DIGESTS:
            del self.digests[next(iter(self.digests))]
        return digest

    def open(self, id: str, **more: Any) -> Future:
        """Return a new future. ``more`` are other fields of its promise."""
        self._all[id] = Future({"request_id": id, **more})
        return self._all[id]

    def resolve(self, future: Future, answer: Answer) -> None:
        """Set the answer of a future."""
        future.answer = answer
        future.known.set()
        id = future.promise["request_id"]
        self._done[id] = len(answer.content) + OVERHEAD
        self._bytes += self._done[id]
        while self._bytes > MAX_BYTES:
            self.forget(next(iter(self._done)))

    def forget(self, id: str) -> None:
        """Drop a future that has its answer; does nothing for others."""
        if id in self._done:
            self._bytes -= self._done.pop(id)
            del self._all[id]
