"""Worker of a node. The tests with Slurm run all of it."""

import socket

import pytest

from rl.launch import node


def test_no_other_process_takes_the_port_before_the_worker_listens():
    with node.reserve("127.0.0.1") as reserved:
        address = reserved.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.create_server(address):  # with SO_REUSEADDR, as Monarch listens
            assert node.listens(*address)
