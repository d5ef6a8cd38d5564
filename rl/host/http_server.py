"""HTTP servers of Tiller."""

import asyncio
import logging
from collections import Counter
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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


class _Http(HttpToolsProtocol):
    """Connection that is closed if the head of a request takes longer than HEAD_S or is longer than
    MAX_HEAD, or if half of the files that this process may open are connections.
    """

    _clock: asyncio.TimerHandle | None = None
    _awaits_head = True
    _head = 0  # bytes that came while a head was incomplete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._bound_head()
        if len(self.connections) > open_file_limits()[0] // 2:
            transport.abort()  # the other half of the descriptors is the program's own

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        super().data_received(data)
        self._bound_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._awaits_head = True
        self._head = 0  # what came with it may be the body before

    def on_headers_complete(self) -> None:
        self._awaits_head = False
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._awaits_head = False
        self._bound_head()

    def _bound_head(self) -> None:
        if self._awaits_head:
            if self._clock is None:
                self._clock = self.loop.call_later(HEAD_S, self.transport.close)
            if self._head > MAX_HEAD:
                self.send_400_response(f"The head has more than {MAX_HEAD} bytes.")
            return
        self._head = 0
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
