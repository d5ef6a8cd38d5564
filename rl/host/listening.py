"""Addresses that servers listen on."""

import contextlib
import ipaddress
import os
import socket

from rl.errors import ConfigError, error_text, require, require_value

KEY = "TILLER_API_KEY"
"""Variable of the environment with the key that clients have to give."""

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


def address_of(address: str, field: str) -> tuple[str, int, str | None]:
    """Return host and port of HOST:PORT, and the key that the environment has.

    Raises ConfigError, naming ``field``, for another text, and for a host that other machines could
    reach without a key.
    """
    host, _, port = address.rpartition(":")
    holds = bool(host) and port.isdecimal() and int(port) < 2**16
    require_value(holds, field, address, "HOST:PORT, such as 127.0.0.1:9400")
    host = host.strip("[]")
    key = os.environ.get(KEY) or None
    require_key(host, key, field)
    return host, int(port), key


def require_key(host: str, key: str | None, setting: str = "--host") -> None:
    """Raise ConfigError, naming the ``setting`` of the host, if other machines could reach it
    without a key.
    """
    require(
        key is not None or is_loopback(host),
        f"{setting} {host}: other machines can reach it; set {KEY} to a key that clients have to "
        "give",
    )


def listen(host: str, port: int, setting: str = "") -> socket.socket:
    """Return a socket that listens. Raises ConfigError if that is impossible, which begins with
    ``setting``, by default the options of a program.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        setting = setting or f"--host {host} --port {port}"
        raise ConfigError(f"{setting}: {error_text(error)}") from None


def url_of(listener: socket.socket) -> str:
    """Return the URL of a socket that listens."""
    name, port = listener.getsockname()[:2]
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"
