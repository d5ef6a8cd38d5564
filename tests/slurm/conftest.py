import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import CANNOT_RUN_HERE, Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three nodes, n1 to n3."""
    with tempfile.TemporaryDirectory(prefix="slurm") as place:  # sockets want a short path
        cluster = Cluster(Path(place) / "state")
        started = cluster.start()
        if started.returncode == CANNOT_RUN_HERE:
            pytest.skip(started.stderr.strip().splitlines()[-1])
        assert started.returncode == 0, started.stderr
        network = cluster.network()
        yield cluster
        stopped = cluster.stop()
        assert stopped.returncode == 0, stopped.stderr
        assert cluster.traces(network) == []
