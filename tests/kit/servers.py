"""HTTP servers of tests, on the loopback address."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, TypeVar


class Server(ThreadingHTTPServer):
    """Server at ``url``, a free port."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]):
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Handler that logs nothing."""

    def log_message(self, *_: Any) -> None:
        pass

    def body(self) -> bytes:
        """Return the body of the request."""
        return self.rfile.read(int(self.headers["Content-Length"]))


S = TypeVar("S", bound=Server)


@contextmanager
def serving(server: S) -> Iterator[S]:
    """Have the server answer until the block ends."""
    with server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
