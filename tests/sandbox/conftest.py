"""Attacks on each sandbox, run once as root and once as an ordinary user."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = "65534"
AS_NOBODY = """
mount --bind "$1" "$4/python" && mount --bind "$2" "$4/tiller" && cd "$4/tiller" &&
exec setpriv --reuid {user} --regid {user} --clear-groups --inh-caps=-all --bounding-set=-all \\
    env LD_LIBRARY_PATH="$4/python/lib" "$4/python/bin/$3" -B -m tests.sandbox.worker "$5"
"""


@pytest.fixture(scope="session")
def open_folder():
    """Folder that every user can enter; those of pytest are closed."""
    with tempfile.TemporaryDirectory(prefix="tiller-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def bwrap(open_folder) -> Path:
    """Folder with bubblewrap: of this host, or of Debian's package."""
    installed = shutil.which("bwrap")
    if installed:
        return Path(installed).parent
    folder = open_folder / "bubblewrap"
    folder.mkdir()
    script = "apt-get download bubblewrap && dpkg -x bubblewrap_*.deb ."
    script = f"({script}) || (apt-get update && {script})"
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        pytest.skip(f"bubblewrap is not installed and could not be had: {done.stderr[-200:]}")
    return folder / "usr" / "bin"


@pytest.fixture(scope="session")
def attacked(open_folder, request):
    """Return results of all attacks by user and sandbox."""

    @cache
    def run(user: str, sandbox: str) -> dict:
        path = os.environ["PATH"]
        if sandbox == "bubblewrap":
            path = f"{request.getfixturevalue('bwrap')}:{path}"
        command = [sys.executable, "-m", "tests.sandbox.worker", sandbox]
        if user == "root" and os.getuid():
            pytest.skip("only root can try the sandbox as root")
        if user == "ordinary" and os.getuid() == 0:
            command = as_nobody(sandbox, open_folder)
        env = {**os.environ, "PATH": path, "TILLER_SECRET": "secret"}
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    return run


def as_nobody(sandbox: str, folder: Path) -> list[str]:
    """Return the command of the worker as a user who can read neither /root nor this folder."""
    try:
        subprocess.run(["unshare", "-m", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a mount namespace is needed to become an ordinary user: {error}")
    (folder / "python").mkdir(exist_ok=True)
    (folder / "tiller").mkdir(exist_ok=True)
    python = Path(os.path.realpath(sys.executable)).name
    script = AS_NOBODY.format(user=NOBODY)
    arguments = [os.path.realpath(sys.base_prefix), str(ROOT), python, str(folder), sandbox]
    return ["unshare", "-m", "bash", "-c", script, "bash", *arguments]
