"""Durable memory of a server: facts by kind and name, and a journal of requests with answers."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rl.errors import RunError, error_text
from rl.session.concurrency import Signal
from rl.tinker.errors import BadRequest, UserError

TABLES = """
PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS facts (kind TEXT, name TEXT, fact TEXT, PRIMARY KEY (kind, name));
CREATE TABLE IF NOT EXISTS requests (owner TEXT, seq INTEGER, verb TEXT, body BLOB, answer BLOB,
    media TEXT, digest BLOB, PRIMARY KEY (owner, seq));
"""
HAS_DIGESTS = "SELECT 1 FROM pragma_table_info('requests') WHERE name = 'digest'"
KINDS = ("session", "model", "sampler", "checkpoint", "loss", "folder")
MAX_FACTS = 100_000
"""Maximum number of facts of a kind."""
KEPT = 4096
"""Number of latest answers of a model that are kept."""
FAILED = b'{"error"'
"""Beginning of the answer to a request that failed."""
LAZY_S = 1.0
"""Time for which changes wait for one that is needed."""
RETRY_S = 1.0
"""Time between attempts to write to a disk that is full or lost."""

Record = dict[str, Any]


class Accepted(NamedTuple):
    """Request of a model or sampler as it was accepted."""

    seq: int
    verb: str
    body: bytes = b""


class Answer(NamedTuple):
    """Result of a request, in the form in which a client gets it."""

    content: bytes
    media: str = "application/json"

    @classmethod
    def of(cls, **fields: Any) -> "Answer":
        """Return a JSON object."""
        return cls(json.dumps(fields).encode())

    @classmethod
    def failure(cls, error: str, category: str) -> "Answer":
        """Return the error of a request; ``category`` is ``user`` or ``server``."""
        return cls.of(error=error, category=category)

    @property
    def is_failure(self) -> bool:
        """Whether the request failed."""
        return self.content.startswith(FAILED)


class Store:
    """SQLite database of a server. ::

        store = Store(folder / "server.db", events.warn)
        store.put("session", "sess-1", {"display_name": "mine"})
        store.accept("sess-1:train:0", Accepted(1, "optim_step", body))
        await store.flush()     # all of this is on disk, or nothing of it

    - Calls that change something return at once. They take effect in their order. Those that no
      ``await`` separates take effect together. ``flush`` waits until they are on disk.
    - ``facts`` has the facts of each kind by name. Change them by ``put`` and ``drop`` alone.
    - ``forget`` is written with the next change, or after LAZY_S, and ``flush`` does not wait for
      it: after a kill, what was forgotten may be known again.
    - A write that fails is tried again; ``flush`` and ``require_written`` raise RunError meanwhile.
    """

    def __init__(self, path: Path, warn: Callable[[str], object]):
        self._warn = warn
        self._waiting: list[tuple[str, tuple[Any, ...]]] = []
        self._asked = self._needed = self._written = 0  # numbers of statements
        self._failure = ""  # of the latest attempt to write
        self._changed = Signal()
        self._writing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "store")
        self.make_room: Callable[[str], object] = str
        """Function that drops facts of a kind which are not in use, if there are too many."""
        self.facts: dict[str, dict[str, Record]] = {kind: {} for kind in KINDS}
        try:
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._database.executescript(TABLES)
            if not self._database.execute(HAS_DIGESTS).fetchone():  # of an older server
                self._database.execute("ALTER TABLE requests ADD COLUMN digest BLOB")
            for kind, name, fact in self._database.execute("SELECT kind, name, fact FROM facts"):
                self.facts[kind][name] = json.loads(fact, parse_constant=lambda _: None)
        except (sqlite3.Error, ValueError, LookupError) as error:
            fix = "make it readable and writable, or restore it from a backup"
            raise RunError(f"{path} cannot be used: {error_text(error)}; {fix}") from error

    def get(self, kind: str, name: str) -> Record:
        """Return a fact. Raises BadRequest if it is unknown."""
        if name not in self.facts[kind]:
            raise BadRequest(404, f"there is no {kind} {name!r}, or it was forgotten")
        return self.facts[kind][name]

    # Changes.

    def put(self, kind: str, name: str, fact: Record) -> None:
        """Set a fact, which is JSON. Raises BadRequest if there are too many."""
        if name not in self.facts[kind] and len(self.facts[kind]) >= MAX_FACTS:
            self.make_room(kind)
            if len(self.facts[kind]) >= MAX_FACTS:
                text = f"the server has {MAX_FACTS:,} facts of kind {kind} in use, the maximum"
                raise BadRequest(429, text)
        try:
            name.encode()
            text = json.dumps(fact, allow_nan=False)
        except ValueError as error:  # it could never be written, or never be listed
            raise UserError(f"a {kind} cannot be kept: {error}") from None
        self._write("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", kind, name, text)
        self.facts[kind][name] = fact

    def drop(self, kind: str, name: str) -> Record:
        """Forget a fact; return it, or {} if it is unknown."""
        self._write("DELETE FROM facts WHERE kind = ? AND name = ?", kind, name)
        return self.facts[kind].pop(name, {})

    def accept(self, owner: str, request: Accepted, digest: bytes | None = None) -> None:
        """Note a request of the model or sampler ``owner``, with the digest of its content."""
        sql = "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, NULL, NULL, ?)"
        self._write(sql, owner, *request, digest)

    def answer(self, owner: str, seq: int, answer: Answer, *, keep: bool = False) -> None:
        """Note the answer to a request. Drop its body unless ``keep`` is set, and an old answer."""
        sql = (
            "UPDATE requests SET answer = ?, media = ?, body = iif(?, body, NULL) "
            "WHERE owner = ? AND seq = ?"
        )
        self._write(sql, *answer, keep, owner, seq)
        sql = "DELETE FROM requests WHERE owner = ? AND seq = ? AND body IS NULL"
        self._write(sql, owner, seq - KEPT)

    def forget(self, owner: str, seq: int | None = None) -> None:
        """Forget one request, or without ``seq`` all, of ``owner``."""
        sql = "DELETE FROM requests WHERE owner = ? AND seq = coalesce(?, seq)"
        self._write(sql, owner, seq, is_lazy=True)

    def cut(self, owner: str, seq: int) -> None:
        """Drop the bodies of the requests up to ``seq``, and all but their latest answers."""
        self._write("UPDATE requests SET body = NULL WHERE owner = ? AND seq <= ?", owner, seq)
        self._write("DELETE FROM requests WHERE owner = ? AND seq <= ?", owner, seq - KEPT)

    def _write(self, sql: str, *values: Any, is_lazy: bool = False) -> None:
        self._waiting.append((sql, values))
        self._asked += 1
        if is_lazy:
            asyncio.get_running_loop().call_later(LAZY_S, self._begin)
            return
        self._needed = self._asked
        self._begin()

    def _begin(self) -> None:
        if self._writing is None and self._waiting:
            self._writing = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        while batch := self._waiting:
            self._waiting = []
            while error := await self._in_thread(self._commit, batch):
                if error != self._failure:
                    self._warn(f"the server's database cannot be written: {error}; trying again")
                self._failure = error
                self._changed.notify()
                await asyncio.sleep(RETRY_S)
            self._failure = ""
            self._written += len(batch)
            self._changed.notify()
        self._writing = None

    def _commit(self, batch: list[tuple[str, tuple[Any, ...]]]) -> str:
        """Write a batch in one transaction; return the error that prevents it, if any."""
        try:
            with self._database:
                self._database.execute("BEGIN")
                for statement in batch:
                    self._database.execute(*statement)
        except sqlite3.ProgrammingError:  # it is closed
            return ""
        except sqlite3.Error as error:
            return error_text(error)
        return ""

    def require_written(self) -> None:
        """Raise RunError if the latest changes could not be written."""
        if self._failure:
            text = f"the server's database cannot be written: {self._failure}"
            raise RunError(f"{text}; the server tries again and goes on once it can")

    async def flush(self) -> None:
        """Wait until all changes before this call but those of ``forget`` are on disk. Raises
        RunError if they cannot be written now.
        """
        asked = self._needed
        await self._changed.until(lambda: self._written >= asked or self._failure)
        if self._written < asked:
            self.require_written()

    async def until_written(self) -> None:
        """Wait until all changes before this call are on disk, however long that takes."""
        asked = self._asked
        self._begin()
        await self._changed.until(lambda: self._written >= asked)

    # Reading.

    async def answered(self, owner: str, seq: int) -> Answer | None:
        """Return the answer to a request; None if the request is unknown or has none yet."""
        await self.flush()
        sql = "SELECT answer, media FROM requests WHERE owner = ? AND seq = ? AND media NOT NULL"
        rows = await self._select(sql, owner, seq)
        return Answer(*rows[0]) if rows else None

    async def progress(self, owner: str) -> int:
        """Return the number of the request after the last one that has an answer."""
        sql = "SELECT coalesce(max(seq), -1) FROM requests WHERE owner = ? AND media NOT NULL"
        return (await self._select(sql, owner))[0][0] + 1

    async def journal(self, owner: str, first: int, end: int = 2**62) -> list[Accepted]:
        """Return the requests ``first`` to ``end`` - 1 that have a body, but those that failed."""
        sql = (
            "SELECT seq, verb, body FROM requests WHERE owner = ? AND seq >= ? AND seq < ? "
            "AND body NOT NULL AND (answer IS NULL OR substr(answer, 1, ?) != ?) ORDER BY seq"
        )
        rows = await self._select(sql, owner, first, end, len(FAILED), FAILED)
        return [Accepted(*row) for row in rows]

    async def digests(self) -> list[tuple[str, bytes]]:
        """Return the ids of all requests, and the digests of their contents."""
        sql = "SELECT owner || ':' || seq, digest FROM requests WHERE digest NOT NULL"
        return await self._select(sql)

    async def samples(self) -> list[str]:
        """Return the ids of all requests for samples."""
        sql = "SELECT owner || ':' || seq FROM requests WHERE verb = 'sample'"
        return [id for (id,) in await self._select(sql)]

    async def _select(self, sql: str, *values: Any) -> list[Any]:
        await self.until_written()
        try:
            return await self._in_thread(lambda: self._database.execute(sql, values).fetchall())
        except sqlite3.Error as error:
            raise RunError(f"the server's database cannot be read: {error_text(error)}") from error

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, call, *arguments)

    async def close(self) -> None:
        """Write what waits, and close the database. Raises RunError if it cannot be written now."""
        self._needed = self._asked
        self._begin()
        await self.flush()
        await self._in_thread(self._database.close)
