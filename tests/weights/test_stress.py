"""500 versions at full speed to three readers with a kill: no torn or stale values, no hang, no
leftover memory.
"""

import multiprocessing
import os
from pathlib import Path

import tests.training.ranks  # noqa: F401  its server has imported torch
from rl.weights.shared_memory import Segment
from tests.weights import stress

READERS = [(0, 0.0), (1, 0.0002), (3, 0.001)]  # versions late; seconds from one slice to the next
_server = multiprocessing.get_context("forkserver")


def start(function, *args):
    process = _server.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def inodes(segments: list[Segment]) -> set[str]:
    return {
        str(os.stat(f"/proc/{segment.pid}/fd/{fd}").st_ino)
        for segment in segments
        for fd in segment.fds
    }


def holders(wanted: set[str]) -> set[int]:
    """Return the processes that map or have open one of the memories with these inodes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = [
                line.split()
                for line in (process / "maps").read_text().splitlines()
                if "/memfd:tiller" in line
            ]
            opened = [
                str(os.stat(fd).st_ino)
                for fd in (process / "fd").iterdir()
                if "/memfd:tiller" in os.readlink(fd)
            ]
        except OSError:  # the process ended meanwhile
            continue
        if wanted & {inode for _, _, _, _, inode, *_ in maps} or wanted & set(opened):
            found.add(int(process.name))
    return found


def named_memory(pid: int) -> set[str]:
    return {
        line.split()[-1]
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line
    }


def test_readers_of_any_speed_see_whole_increasing_versions_despite_a_kill(tmp_path):
    path = str(tmp_path / "board")
    stress.open_board(path).zero_()[stress.ANNOUNCED] = -1
    board = stress.open_board(path)
    addresses, of_writer = _server.Pipe(duplex=False)
    answers, of_reader = _server.Pipe(duplex=False)
    processes = [start(stress.write, path, of_writer)]
    try:
        assert addresses.poll(stress.DEADLINE_S)
        segments = addresses.recv()
        memory = inodes(segments)
        processes += [start(stress.read, path, segments, n, *READERS[n], of_reader) for n in (0, 1)]
        victim = start(stress.hang, path, segments, 2)
        processes.append(victim)

        stress.wait_until(lambda: bool(board[stress.COPYING]))
        assert holders(memory) == {process.pid for process in processes}
        assert not any(named_memory(process.pid) for process in processes)
        victim.kill()
        victim.join(stress.DEADLINE_S)
        processes[processes.index(victim)] = start(
            stress.read, path, segments, 3, *READERS[2], of_reader
        )

        for process in processes:
            process.join(stress.DEADLINE_S)
        assert [process.exitcode for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert int(board[stress.ANNOUNCED]) == stress.VERSIONS - 1
    assert min(answers.recv() for _ in range(3)) > 20
    assert not holders(memory)
