"""HTTP servers of Tiller."""

import asyncio
import logging
from collections import Counter
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl.errors import open_file_limits

MAX_HEAD = 64 * 2**10
"""Maximum size of the head of a request, in bytes."""
HEAD_S = 20.0
"""Time for the head of a request to arrive."""
KEEP_ALIVE_S = 75
"""Time for which a connection is kept for its client's next request. Clients keep theirs for up to
a minute, and fail if it ends just when they use it again."""


def server_config(app: Any, *, stop_s: int) -> uvicorn.Config:
    """Return the config of an HTTP server of ``app``, which takes no longer or slower heads than
    MAX_HEAD and HEAD_S. Answers that are being sent when it stops get ``stop_s`` seconds.
    """
    logging.getLogger("asyncio").addFilter(_repeated)
    return uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        http=_Http,
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_graceful_shutdown=stop_s,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


class _Repeated(logging.Filter):
    """Lets an error pass once, and then at 10, 100 … times, with their number: asyncio reports a
    lack of open files thousands of times per second.
    """

    def __init__(self) -> None:
        super().__init__()
        self._times = Counter[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        self._times[text] += 1
        times = self._times[text]
        if times > 1:
            record.msg, record.args = "%s (%d times so far)", (text, times)
        return times == 10 ** (len(str(times)) - 1)


_repeated = _Repeated()


class _Http(H11Protocol):
    """Connection that is closed if the head of a request takes longer than HEAD_S, or if half of
    the files that this process may open are connections.
    """

    _clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > open_file_limits()[0] // 2:
            transport.abort()  # the other half of the descriptors is the program's own

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_clock()

    def _await_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_clock()
        elif self._clock is None:
            self._clock = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
