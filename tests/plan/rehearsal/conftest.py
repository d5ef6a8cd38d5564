import pytest

from tests.plan.rehearsal.rehearsals import Rehearsals


@pytest.fixture(scope="package")
def rehearsals():
    """Return the process of the rehearsals."""
    process = Rehearsals()
    yield process
    process.close()
