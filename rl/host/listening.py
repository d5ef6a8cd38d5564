"""Addresses that servers listen on."""

import contextlib
import ipaddress
import socket

from rl.errors import ConfigError, require, said_by

NO_LOOPBACK = (
    "a connection to 127.0.0.1 fails, which the processes of a run need",
    "run: ip link set lo up",
)
"""Fault of a host whose loopback interface is down, and its remedy."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def has_loopback() -> bool:
    """Whether processes of this host can connect to each other through 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError:
        return False
    return True


def require_key(host: str, key: str | None) -> None:
    """Raise ConfigError if other machines could reach ``host`` without a key."""
    require(
        key is not None or is_loopback(host),
        f"--host {host}: other machines can reach it; set TILLER_API_KEY to a key that clients "
        "have to give",
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ConfigError if that is impossible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port}: {said_by(error)}") from None


def url_of(listener: socket.socket) -> str:
    """Return the URL of a socket that listens."""
    name, port = listener.getsockname()[:2]
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"
