"""A server leaves half of the files that its process may open to the program around it."""

import contextlib
import logging
import resource
import socket
import threading

import pytest
import uvicorn

from rl.errors import error_text
from rl.host.http_server import server_config
from rl.host.listening import listen
from rl.host.process import allow_open_files


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


@pytest.fixture
def limited():
    """A limit of 256 open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_idle_connections_beyond_half_of_the_files_are_ended(monkeypatch):
    """The clients are in this process too: no real limit leaves the server its half."""
    monkeypatch.setattr("rl.host.http_server.open_file_limits", lambda: (100, 100))

    def ask(address) -> bytes:
        """Return the answer; b"" if the server ends the connection without one."""
        with (
            socket.create_connection(address, timeout=60) as client,
            contextlib.suppress(ConnectionError),
        ):
            client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            return client.recv(4096)
        return b""

    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(server_config(app, stop_s=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        address = listener.getsockname()
        idle = [socket.create_connection(address, timeout=60) for _ in range(50)]
        assert ask(address) == b""
        for connection in idle:
            connection.close()
        while b"here" not in ask(address):
            pass  # until the server knows of the closed ones
        server.should_exit = True
        thread.join(60)


def test_a_repeated_error_is_logged_with_its_number(caplog):
    server_config(app, stop_s=1)
    for _ in range(1000):
        logging.getLogger("asyncio").error("no more files of %s", "this test")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "no more files of this test",
        "no more files of this test (10 times so far)",
        "no more files of this test (100 times so far)",
        "no more files of this test (1000 times so far)",
    ]


def test_a_lack_of_open_files_names_the_limit(limited):
    with pytest.raises(OSError, match="Too many open files") as raised:
        files = [open("/dev/null") for _ in range(300)]  # noqa: SIM115
        del files
    assert "this process may open 256 files, at most " in error_text(raised.value)


def test_a_program_raises_its_limit_of_open_files(limited):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert allow_open_files() == min(hard, 2**20) > 256
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 2**20), hard)
