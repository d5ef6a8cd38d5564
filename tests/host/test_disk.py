"""A kill at any moment leaves a whole folder under its name, and what is written is on disk."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl.host import disk
from rl.host.disk import TemporaryFolder, boot, shorten
from tests.kit.tables import check_rows

KILLED = """
import os, shutil, sys
from pathlib import Path
from rl.host import disk

exchanges, left, folder = sys.argv[1] == "True", int(sys.argv[2]), Path(sys.argv[3])
if not exchanges:
    disk.exchange = lambda *paths: False

def counted(function):
    def call(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        return function(*arguments, **options)
    return call

for owner, name in ((os, "fsync"), (os, "rename"), (shutil, "rmtree"), (disk, "exchange")):
    setattr(owner, name, counted(getattr(owner, name)))
disk.replace_folder(folder, folder.with_name("new.partial"))
print(left)
"""


def written(folder, text):
    folder.mkdir()
    (folder / "state").write_text(text)
    (folder / "inner").mkdir()
    (folder / "inner" / "more").write_text(text)
    return folder


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_leaves_the_old_folder_or_the_new_one(tmp_path, exchanges):
    codes = set()
    for number in range(16):
        top = tmp_path / str(number)
        top.mkdir()
        folder = written(top / "latest", "old")
        written(top / "new.partial", "new")
        program = [sys.executable, "-c", KILLED, str(exchanges), str(number), str(folder)]
        code = subprocess.run(program, stdout=subprocess.DEVNULL).returncode
        codes.add(code)
        assert folder.exists() or not exchanges
        disk.restore_folder(folder)
        text = (folder / "state").read_text()
        assert (folder / "inner" / "more").read_text() == text
        assert text == "new" if code == 0 else text in ("old", "new")
        if code == 0:
            assert os.listdir(top) == ["latest"]
            break
    assert codes == {0, -signal.SIGKILL}


def test_a_folder_that_replaces_another_is_on_disk(tmp_path, monkeypatch):
    synced = set()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), fsync(fd)))
    for name in ("first", "second"):
        synced.clear()
        disk.replace_folder(tmp_path / "folder", written(tmp_path / name, name))
        inside = [tmp_path, tmp_path / "folder", *(tmp_path / "folder").rglob("*")]
        assert synced >= {each.stat().st_ino for each in inside}
        assert os.listdir(tmp_path) == ["folder"]


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    target = written(tmp_path / "target", "old")
    (tmp_path / "latest").symlink_to(target)
    disk.replace_folder(tmp_path / "latest", written(tmp_path / "new", "new"))
    assert (tmp_path / "latest" / "state").read_text() == "new"
    assert (target / "state").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["latest", "target"]


def test_a_long_log_keeps_its_end_while_a_process_appends(tmp_path):
    log = tmp_path / "log"
    shorten(log, 100, 20)
    assert not log.exists()
    with open(log, "ab", buffering=0) as file:
        file.write(b"".join(b"line %d\n" % number for number in range(12)))
        shorten(log, 100, 20)
        assert log.read_bytes().startswith(b"line 0\n")
        file.write(b"line 12 is longer than the others\n")
        shorten(log, 100, 34)
        file.write(b"end\n")
    assert log.read_text().splitlines() == [
        "[86 bytes before this line were dropped]",
        "line 12 is longer than the others",
        "end",
    ]


LEAVES = """
import os, sys
from pathlib import Path
from rl.host.disk import TemporaryFolder

folder = Path(TemporaryFolder("tiller-", Path(sys.argv[1])).name)
deep = folder / "deep" / "closed"
deep.mkdir(parents=True)
(deep / "file").touch()
(folder / "link").symlink_to(sys.argv[1])
deep.chmod(0)
print(folder, flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path):
    program = [sys.executable, "-c", LEAVES, str(tmp_path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        left = Path(process.stdout.readline().decode().strip())
        with TemporaryFolder("tiller-", tmp_path):
            assert left.is_dir()  # its process lives
        process.communicate()
    assert left.is_dir()
    with TemporaryFolder("other-", tmp_path):
        assert left.is_dir()
    with TemporaryFolder("tiller-", tmp_path) as name:
        found = {each.name for each in tmp_path.iterdir()}
        assert found == {os.path.basename(name), f"{os.path.basename(name)}.lock"}
    assert [*tmp_path.iterdir()] == []


UNPROVEN = {
    "without a file": None,
    "with an empty file": "",
    "of another boot": "00000000-0000-4000-8000-000000000000",
    "with a file of its own": "mine",
}


def test_a_folder_that_may_have_an_owner_is_never_removed(tmp_path):
    def check(name):
        (tmp_path / "tiller-x").mkdir(exist_ok=True)
        lock = tmp_path / "tiller-x.lock"
        if UNPROVEN[name] is not None:
            lock.write_text(UNPROVEN[name])
        with TemporaryFolder("tiller-", tmp_path):
            assert (tmp_path / "tiller-x").is_dir() and lock.exists() == (name != "without a file")

    check_rows(UNPROVEN, check)
    lock = tmp_path / "tiller-x.lock"
    lock.unlink()
    (tmp_path / "made").write_text(boot())
    lock.symlink_to(tmp_path / "made")
    with TemporaryFolder("tiller-", tmp_path):
        assert (tmp_path / "tiller-x").is_dir()
    lock.unlink()
    lock.write_text(boot())
    with TemporaryFolder("tiller-", tmp_path):
        assert not (tmp_path / "tiller-x").exists() and not lock.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user")
def test_a_folder_of_another_user_is_never_removed(tmp_path):
    for number, owned in enumerate(("{}", "{}.lock")):
        folder = tmp_path / f"tiller-{number}"
        folder.mkdir()
        (tmp_path / f"tiller-{number}.lock").write_text(boot())
        os.chown(tmp_path / owned.format(folder.name), 65534, 65534)
        with TemporaryFolder("tiller-", tmp_path):
            assert folder.is_dir()
