"""The helper itself: tests of several ranks must fail soon, say why, and leave nothing behind."""

import multiprocessing
import os
import time

import pytest

from tests.kit.ranks import DEADLINE_S, on_ranks


def fails_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("what went wrong")
    time.sleep(600)


def crashes():
    os.abort()


def waits():
    time.sleep(600)


def threads_of_parent() -> list[str]:
    return os.listdir(f"/proc/{os.getppid()}/task")


def test_ranks_are_forked_from_a_server_of_one_thread():
    (threads,) = on_ranks(1, threads_of_parent)
    assert len(threads) == 1


@pytest.mark.parametrize(
    ("function", "message", "deadline"),
    [
        (fails_on_rank_1, "rank 1 of 2 failed:\n(.|\n)*ValueError: what went wrong", DEADLINE_S),
        (
            crashes,
            "rank . of 2 died with exit code -6\nFatal Python error(.|\n)* in crashes",
            DEADLINE_S,
        ),
        (waits, r"ranks \[0, 1\] of 2 did not answer in time", 0.1),
    ],
)
def test_an_error_is_reported_and_no_process_is_left(function, message, deadline):
    others = set(multiprocessing.active_children())
    with pytest.raises(AssertionError, match=message):
        on_ranks(2, function, deadline=deadline)
    assert set(multiprocessing.active_children()) == others
