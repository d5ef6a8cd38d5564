"""A rehearsal finds what fails or waits on a GPU only."""

import pytest

from tests.plan.rehearsal.layouts import DENSE
from tests.plan.rehearsal.mutations import MUTATIONS
from tests.plan.rehearsal.waits import is_known, waits_of

ARGUMENTS = DENSE.replace("n_layers 2", "n_layers 1")


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_error_in_the_code_is_found(name, rehearsals):
    mutation = MUTATIONS[name]
    found = rehearsals.of(ARGUMENTS, change=mutation)
    if mutation.error:
        assert found["error"].startswith("forward_backward 1: ")
        assert mutation.error in found["error"]
    else:
        assert found["error"] is None
        assert [wait for wait in waits_of(found) if not is_known(wait)]
