"""Ends of the calls of a blocking session. tests/session/test_blocking.py has a real one."""

import asyncio
import signal
import threading

import pytest

from rl.errors import RankLost, RunError
from rl.session.blocking import BlockingSession

WAIT_S = 60.0


class FakeSession:
    """Does what a test asks for, and notes it."""

    def __init__(self, *, start=None):
        self.log = []
        self._start = start

    async def __aenter__(self):
        self.log.append("start")
        if self._start is not None:
            await self._start()
        self.lost = asyncio.Event()
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._watch = self._group.create_task(self._raise_lost())
        return self

    async def __aexit__(self, kind, error, trace):
        self.log.append(f"stop {kind and kind.__name__}")
        self._watch.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _raise_lost(self):
        await self.lost.wait()
        raise RankLost("trainer rank 0 died", actor="trainer", rank=0, call="x", kind="died")

    async def double(self, number):
        """Return twice the number."""
        await asyncio.sleep(0.01)
        return 2 * number

    async def wait_for_ever(self):
        self.log.append("wait")
        try:
            await asyncio.sleep(1000)
        finally:
            self.log.append("cancelled")

    async def finish_cancelled(self):
        await asyncio.sleep(0.1)
        self.log.append("finished")

    async def lose(self):
        self.lost.set()

    def thread(self):
        """Return the name of the thread that calls it."""
        asyncio.get_running_loop()
        return threading.current_thread().name

    async def running(self):
        raise AssertionError("the facade runs the session itself")


@pytest.fixture(autouse=True)
def clean():
    """Have an alarm do what Ctrl-C does in a notebook. Assert that no thread is left."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGALRM, before)
    assert "session" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def session():
    with BlockingSession(FakeSession()) as session:
        yield session


def interrupted(call) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        call()


def test_public_names_are_the_verbs_and_their_docstrings(session):
    assert {"double", "thread", "open", "close"} <= {*dir(session)}
    assert session.double.__doc__ == "Return twice the number."
    assert session.thread() == "session"
    for hidden in ("running", "_start", "nothing"):
        assert hidden not in dir(session)
        with pytest.raises(AttributeError, match=hidden):
            getattr(session, hidden)


def test_calls_of_several_threads_take_turns(session):
    given = []
    threads = [
        threading.Thread(target=lambda i=i: given.append(session.double(number=i)))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(given) == [0, 2, 4, 6, 8, 10, 12, 14]


def test_ctrl_c_cancels_the_call_and_the_next_one_waits_until_it_has_ended(session):
    interrupted(session.wait_for_ever)
    assert session.double(2) == 4
    assert session._session.log == ["start", "wait", "cancelled", "finished"]


def test_a_lost_model_is_raised_by_the_pending_call_and_by_every_later_one():
    session = BlockingSession(FakeSession()).open()
    lose = threading.Timer(0.2, lambda: session._loop.call_soon_threadsafe(session.lost.set))
    lose.start()
    calls = [session.wait_for_ever, *[lambda: session.double(1)] * 2, session.close]
    for call in calls:
        with pytest.raises(RankLost, match="trainer rank 0 died"):
            call()
    assert "finished" not in session._session.log
    session.close()


def test_a_model_that_is_lost_between_calls_is_raised_at_the_end_of_the_block():
    with pytest.raises(RankLost), BlockingSession(FakeSession()) as session:
        session.lose()


def test_calls_before_open_and_after_close_are_errors_and_a_second_close_does_nothing():
    session = BlockingSession(FakeSession())
    with pytest.raises(RunError, match="not open"):
        session.double(1)
    session.close()
    session.open()
    session.close()
    session.close()
    assert session._session.log == ["start", "stop None"]
    with pytest.raises(RunError, match="was closed"):
        session.double(1)


def test_an_error_in_the_block_ends_the_session_at_once():
    fake = FakeSession()
    with pytest.raises(ZeroDivisionError), BlockingSession(fake):
        raise ZeroDivisionError
    assert fake.log == ["start", "stop CancelledError"]


def test_an_error_and_ctrl_c_at_the_start_end_it():
    async def fail():
        raise RunError("no device")

    with pytest.raises(RunError, match="no device"):
        BlockingSession(FakeSession(start=fail)).open()
    interrupted(BlockingSession(FakeSession(start=lambda: asyncio.sleep(1000))).open)
