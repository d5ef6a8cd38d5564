"""A session without a given folder removes its temporary folder, however it ends."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.session.session import Session
from rl.session.session_config import SessionConfig
from tests import warm


class Group:
    """A trainer that saves in the background until it is closed."""

    name = "trainer"
    ranks = 1
    version = 0
    loads = 0

    def __init__(self, *, fails: str | None = None):
        self.is_running = False
        self.fails = fails
        self.folder = None

    async def start(self):
        if self.fails == "device":
            raise OSError("no such device")
        self.is_running = True

    async def stop(self):
        if self.fails == "end":
            raise OSError("the end failed")
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


@pytest.mark.parametrize("fails", [None, "device", "block", "end"])
def test_a_session_removes_its_folder_however_it_ends_after_the_last_save(fails):
    group = Group(fails=fails)

    async def run() -> None:
        async with session_of(group):
            if fails == "block":
                raise OSError("the block failed")

    if fails:
        with pytest.raises(OSError, match=fails):
            asyncio.run(run())
    else:
        asyncio.run(run())
    assert not group.folder.exists()


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
