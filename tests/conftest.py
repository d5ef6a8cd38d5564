"""Selection and order of the tests, warm processes, and the list of tests that did not run."""

import asyncio
import gc
import inspect
import os
import re
import signal
import zlib
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from rl.actors import fork_server
from rl.host.process import COLLECT_AT
from tests import warm

pytest_plugins = ["tests.durations.plugin", "tests.kit.hub", "tests.must_run"]

ROOT = Path(__file__).parent
ENGINES = (
    *("e2e", "slurm", "session", "generation", "training", "trainers", "weights", "plan"),
    *("test_docs.py", "actors", "launch", "gateway", "gpu_check", "sandbox", "tinker_sdk"),
)
"""Folders and files whose tests start engines, the longest first. The others are pure."""
SHARED = (
    r"e2e/test_(algorithms|compare|gateway|programs|replay|tool_quickstart)\.py",
    *("e2e/", "slurm/", "session/", "generation/", "tinker_sdk/"),
    r"training/test_(checkpoint|experts|gradient|hugging_face|layouts)\.py",
)
"""Patterns of files that share engines or runs, so that one worker runs them. The first counts."""
ASYNC_TEST_S = 300.0
"""Longest time of an async test that is not marked as long."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rooms", choices=["pure", "engines"], help="run one kind of folders")
    parser.addoption(
        "--slice",
        type=_slice,
        metavar="K/N",
        help="run the K-th of N parts of the long tests, and all that are not long",
    )


def _slice(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--slice {text}: must be K/N with 1 <= K <= N, such as 3/8")
    return int(number), int(count)


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.register_profile("tests", deadline=None)  # machines may be busy
    hypothesis.settings.load_profile("tests")
    fork_server.variables = warm.rank_variables
    os.fsync = lambda descriptor: None  # no test cuts the power, and thousands take minutes
    # Programs that tests start inherit what nohup(1) or the background of a script ignores.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, lambda *_: None),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test on the loop of the fixture ``runner``, or on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters.keys() & pyfuncitem.funcargs.keys()
    longest = None if pyfuncitem.get_closest_marker("long") else ASYNC_TEST_S

    async def bounded() -> None:
        async with asyncio.timeout(longest):
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})

    runner = pyfuncitem.funcargs.get("runner")
    (runner.run if runner else asyncio.run)(bounded())
    return True


@pytest.fixture
def behind_proxy(monkeypatch):
    """Have HTTP clients ask a proxy that does not answer. Assert that exceptions stay."""
    excluded = "judge.corp,10.0.0.0/8"
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", excluded)
    monkeypatch.setenv("no_proxy", "")
    yield
    for name in ("NO_PROXY", "no_proxy"):
        assert os.environ[name] == f"{excluded},127.0.0.1,localhost"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    rooms = config.getoption("--rooms")
    if rooms is None or collection_path == ROOT:
        return None
    starts_engines = _room(collection_path.relative_to(ROOT).parts[0]) < len(ENGINES)
    return True if starts_engines != (rooms == "engines") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if chosen := config.getoption("--slice"):
        number, count = chosen
        kept = [
            item
            for item in items
            if item.get_closest_marker("long") is None
            or (
                zlib.crc32(item.nodeid.encode()) % count == number - 1
                and item.get_closest_marker("download") is None
            )
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in {*kept}])
        items[:] = kept
    items.sort(key=lambda item: _room(_folder(item.nodeid)))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # a collection need not look at what the imports have made
    gc.set_threshold(*COLLECT_AT)
    if any(_room(_folder(item.nodeid)) < len(ENGINES) for item in session.items):
        forkserver.ensure_running()  # its imports begin now, and no test has changed the variables


def _folder(nodeid: str) -> str:
    """Return the name of a test's folder in tests/, or the name of its file there."""
    return nodeid.partition("::")[0].removeprefix("tests/").partition("/")[0]


def _room(folder: str) -> int:
    """Return the place of a folder in ENGINES; its length if the folder is pure."""
    return ENGINES.index(folder) if folder in ENGINES else len(ENGINES)


class Rooms(LoadScopeScheduling):
    """Gives whole files to the workers, and whole folders if their files share engines."""

    def _split_scope(self, nodeid: str) -> str:
        shared = (pattern for pattern in SHARED if re.match(f"tests/{pattern}", nodeid))
        return next(shared, nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Rooms:
    config.option.loadscopereorder = False  # the longest come first
    return Rooms(config, log)


@pytest.fixture
def dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the package ``datasets`` for the files that a test converts."""
    folder = tmp_path / "datasets"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model of ``scripts/make_tiny_model.py``, which no test changes. Its 60 problems
    are beside it, in ``data``.
    """
    from tests.kit.tokenizers import make_model

    return make_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 with Qwen3's chat template, which no test changes. Problems are beside
    it, in ``problems.jsonl``.
    """
    from tests.kit.chats import tiny_chat_model

    return tiny_chat_model(tmp_path_factory.mktemp("chat_model"))


def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = Counter[tuple[str, str]]()
    for report in reporter.stats.get("skipped", []) if reporter else []:
        skipped[report.nodeid.partition("::")[0], report.longrepr[2].removeprefix("Skipped: ")] += 1
    for (file, reason), count in sorted(skipped.items()):
        reporter.write_line(f"NOT RUN: {count} of the tests in {file}: {reason}")
