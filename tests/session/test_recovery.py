"""A lost mesh is started again; an exception, and a loss too many, end the session."""

import pytest

from rl.errors import ActorFailure, RankLost, RunError
from rl.observe.events import Events
from rl.session.pool import Recovery
from tests.session.test_folder import Group, session_of


def failure(kind: str, actor: str) -> ActorFailure:
    kind_of = ActorFailure if kind == "raised" else RankLost
    return kind_of(f"{actor} rank 0: gone", actor=actor, rank=0, call="forward", kind=kind)


@pytest.mark.parametrize("kind", ["died", "silent"])
def test_losses_in_a_row_are_survived_up_to_the_limit_and_progress_begins_a_new_row(kind):
    seen = []
    recovery = Recovery(2, Events(seen.append))
    for _ in range(3):
        for number in range(2):
            recovery.survive(failure(kind, "critic"), "going back", progressed=number == 0)
        recovery.survive(
            failure(kind, "generator-0"), "starting it", progressed=True, generator="generator-0"
        )
    lost = failure(kind, "trainer")
    with pytest.raises(RankLost) as raised:
        recovery.survive(lost, "going back", progressed=False)
    assert raised.value is lost
    assert recovery.restarts == 9
    texts = [(event["process"], event["text"]) for event in seen]
    assert texts[0] == ("critic", "critic rank 0: gone; going back")
    assert texts[2] == ("generator-0", "generator-0 rank 0: gone; starting it")


def test_a_generator_that_is_lost_too_often_ends_the_run_with_how_often():
    recovery = Recovery(1, Events())
    lost = failure("died", "generator-1")
    options = {"progressed": False, "generator": "generator-1"}
    recovery.survive(lost, "starting it again", **options)
    with pytest.raises(RunError, match=r"gone\nit was lost 2 times without a completion") as raised:
        recovery.survive(lost, "starting it again", **options)
    assert not isinstance(raised.value, ActorFailure)  # which a checkpoint would mend
    assert raised.value.__cause__ is lost


@pytest.mark.parametrize("generator", ["", "generator-0"])
def test_an_exception_of_an_actor_is_final(generator):
    raised = failure("raised", generator or "trainer")
    with pytest.raises(ActorFailure) as found:
        Recovery(9, Events()).survive(raised, "again", progressed=True, generator=generator)
    assert found.value is raised


@pytest.mark.parametrize("save", ["save", "save_state"])
async def test_a_session_that_saves_survives_more_losses(save):
    class Saving(Group):
        """A trainer that saves what it is told to."""

        async def call(self, endpoint, *args):
            assert endpoint.name in ("save_checkpoint", "save_state")

    session = session_of(Saving())
    lost = failure("died", "trainer")

    for number in range(session.config.max_restarts + 1):
        session.recover(lost)
        await getattr(session, save)(number if save == "save" else session.folder / "state")
    await session.stop()
