"""A rehearsal finds what fails or waits on a GPU only."""

import pytest

from tests.kit.tables import cases
from tests.plan.rehearsal.layouts import DENSE
from tests.plan.rehearsal.mutations import MUTATIONS, ONE_OF_EACH_KIND, WAITS, Together
from tests.plan.rehearsal.rehearsals import is_known, waits_of

ARGUMENTS = DENSE.replace("n_layers 2", "n_layers 1")


@pytest.mark.parametrize(
    "name", cases([name for name, each in MUTATIONS.items() if each.error], ONE_OF_EACH_KIND)
)
def test_an_error_in_the_code_is_found(name, rehearsals):
    mutation = MUTATIONS[name]
    found = rehearsals.of(ARGUMENTS, change=mutation)
    assert found["error"].startswith("forward_backward 1: ")
    assert mutation.error in found["error"]


@pytest.mark.long
def test_every_wait_in_the_code_is_found(rehearsals):
    found = rehearsals.of(ARGUMENTS, change=Together(tuple(WAITS)))
    assert found["error"] is None
    unknown = {wait["place"] for wait in waits_of(found) if not is_known(wait)}
    functions = [mutation.function.rpartition(":")[2].rpartition(".")[2] for mutation in WAITS]
    missed = [
        name for name in functions if not any(place.endswith(f" {name}") for place in unknown)
    ]
    assert not missed, f"no wait of {missed} in {unknown}"
