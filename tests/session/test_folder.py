"""A session without a given folder removes its temporary folder, however it ends."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.session.config import SessionConfig
from rl.session.session import Session
from tests import warm


class Group:
    """A trainer that saves in the background until it is closed."""

    name = "trainer"
    ranks = 1
    version = 0

    def __init__(self, *, fails: bool = False):
        self.is_running = False
        self.fails = fails
        self.folder = None

    async def start(self):
        if self.fails:
            raise OSError("no such device")
        self.is_running = True

    async def stop(self):
        self.is_running = False

    async def close(self):
        (self.folder / "saved").touch()

    async def load_checkpoint(self, step):
        return {}, []

    async def failed(self):
        await asyncio.Event().wait()


def session_of(group: Group) -> Session:
    meshes = SimpleNamespace(models=lambda: {"trainer": group}, generator=None)
    session = Session(SessionConfig(generator=None), meshes=meshes)
    group.folder = session.folder
    assert session.folder.is_dir()
    return session


def test_a_session_that_ends_removes_its_folder_after_the_last_save():
    async def run() -> Session:
        async with session_of(Group()) as session:
            pass
        return session

    assert not asyncio.run(run()).folder.exists()


def test_a_program_that_ends_at_once_removes_the_folder(tmp_path):
    program = (
        "from tests.session.test_folder import Group, session_of\n"
        "from rl.errors import end_program\n"
        "print(session_of(Group()).folder)\n"
        "end_program(0)\n"
    )
    script = tmp_path / "ends.py"
    script.write_text(program)
    done = warm.run(script, timeout=300)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.split()[-1])
    assert folder.name.startswith("tiller-")
    assert not folder.exists()


@pytest.mark.parametrize("fails_in_start", [True, False], ids=["start", "block"])
def test_a_session_that_fails_removes_its_folder(fails_in_start):
    group = Group(fails=fails_in_start)

    async def run() -> None:
        async with session_of(group):
            raise OSError("the block failed")

    with pytest.raises(OSError, match="device" if fails_in_start else "block"):
        asyncio.run(run())
    assert not group.folder.exists()
