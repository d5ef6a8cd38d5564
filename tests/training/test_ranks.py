"""The helper itself: tests of several ranks must fail soon, say why, and leave nothing behind."""

import multiprocessing
import os
import time

import pytest

from tests.training.ranks import on_ranks


def whoami():
    return os.environ["RANK"], os.environ["WORLD_SIZE"]


def fails_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("what went wrong")
    time.sleep(60)


def dies():
    os._exit(3)


def crashes():
    os.abort()


def waits():
    time.sleep(60)


def threads_of_parent() -> list[str]:
    return os.listdir(f"/proc/{os.getppid()}/task")


def test_ranks_are_forked_from_a_server_of_one_thread():
    (threads,) = on_ranks(1, threads_of_parent)
    assert len(threads) == 1


def test_answers_come_back_in_the_order_of_ranks():
    assert on_ranks(2, whoami) == [("0", "2"), ("1", "2")]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails_on_rank_1, "rank 1 of 2 failed:\n(.|\n)*ValueError: what went wrong"),
        (dies, "rank . of 2 died with exit code 3"),
        (crashes, "rank . of 2 died with exit code -6\nFatal Python error(.|\n)* in crashes"),
        (waits, r"ranks \[0, 1\] of 2 did not answer in time"),
    ],
)
def test_an_error_is_reported_and_no_process_is_left(function, message):
    begin = time.monotonic()
    others = set(multiprocessing.active_children())
    with pytest.raises(AssertionError, match=message):
        on_ranks(2, function, deadline=1.5)
    assert time.monotonic() - begin < 30
    assert set(multiprocessing.active_children()) == others
