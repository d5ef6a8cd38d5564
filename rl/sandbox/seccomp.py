"""System calls that a program in the sandbox may make, as a seccomp filter.

All others fail with EPERM. Among them are calls that start processes, send signals, open sockets,
shared memory, message queues, keyrings, namespaces or io_uring, trace or limit other processes, and
change owners, modes or times of files, which Landlock does not restrict.
"""

import platform
import struct
from collections.abc import Iterator

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h

ALLOWED = """
    read=0,63 write=1,64 readv=19,65 writev=20,66 pread64=17,67 pwrite64=18,68 preadv=295,69
    pwritev=296,70 close=3,57 close_range=436,436 stat=4, fstat=5,80 lstat=6, newfstatat=262,79
    statx=332,291 lseek=8,62 ftruncate=77,46 fallocate=285,47 fsync=74,82 fdatasync=75,83
    getdents=78, getdents64=217,61 getcwd=79,17 chdir=80,49 fchdir=81,50 rename=82, renameat=264,38
    renameat2=316,276 mkdir=83, mkdirat=258,34 rmdir=84, creat=85, link=86, linkat=265,37 unlink=87,
    unlinkat=263,35 symlink=88, symlinkat=266,36 readlink=89, readlinkat=267,78 umask=95,166
    access=21, faccessat=269,48 faccessat2=439,439 dup=32,23 dup2=33, dup3=292,24 pipe=22,
    pipe2=293,59 poll=7, ppoll=271,73 select=23, pselect6=270,72 epoll_create=213,
    epoll_create1=291,20 epoll_ctl=233,21 epoll_wait=232, epoll_pwait=281,22 epoll_pwait2=441,441
    eventfd2=290,19 sendfile=40,71 copy_file_range=326,285 statfs=137,43 fstatfs=138,44 flock=73,32
    fadvise64=221,223 mmap=9,222 mprotect=10,226 munmap=11,215 mremap=25,216 madvise=28,233
    msync=26,227 mincore=27,232 brk=12,214 rt_sigaction=13,134 rt_sigprocmask=14,135
    rt_sigreturn=15,139 rt_sigpending=127,136 rt_sigtimedwait=128,137 rt_sigsuspend=130,133
    sigaltstack=131,132 getpid=39,172 gettid=186,178 getppid=110,173 getpgrp=111, getpgid=121,155
    getsid=124,156 getuid=102,174 geteuid=107,175 getgid=104,176 getegid=108,177 getresuid=118,148
    getresgid=120,150 getgroups=115,158 wait4=61,260 waitid=247,95 pause=34, alarm=37,
    setitimer=38,103 getitimer=36,102 nanosleep=35,101 clock_nanosleep=230,115 clock_gettime=228,113
    clock_getres=229,114 gettimeofday=96,169 time=201, times=100,153 getrusage=98,165
    getrlimit=97,163 setrlimit=160,164 uname=63,160 sysinfo=99,179 sched_yield=24,124
    sched_getaffinity=204,123 sched_getparam=143,121 sched_getscheduler=145,120
    sched_get_priority_max=146,125 sched_get_priority_min=147,126 getcpu=309,168 getrandom=318,278
    futex=202,98 set_robust_list=273,99 set_tid_address=218,96 rseq=334,293 membarrier=324,283
    arch_prctl=158, exit=60,93 exit_group=231,94 restart_syscall=219,128 sendto=44,206
    recvfrom=45,207 getsockname=51,204 getsockopt=55,209 shutdown=48,210
"""
"""Calls without conditions, with their numbers on x86-64 and aarch64 (linux/unistd.h). Sockets are
pairs of streams only, so that ``sendto`` reaches nothing else."""

NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*
THREAD = 0x10000  # CLONE_THREAD
TRUNCATE = 0o1000  # O_TRUNC
ACCESS = 0o3  # O_ACCMODE

WHOLE = 0xFFFFFFFF

CONDITIONAL = {
    # name: (numbers, conditions: argument, mask, allowed values of the masked argument)
    "clone": ((56, 220), [(0, NEW_NAMESPACES | THREAD, [THREAD])]),
    # before Linux 6.2 Landlock lets a program truncate a file that it may only read
    "open": ((2, None), [(1, ACCESS | TRUNCATE, [0, 1, 2, 1 | TRUNCATE, 2 | TRUNCATE])]),
    "openat": ((257, 56), [(2, ACCESS | TRUNCATE, [0, 1, 2, 1 | TRUNCATE, 2 | TRUNCATE])]),
    # F_DUPFD to F_SETLKW, F_OFD_*, F_DUPFD_CLOEXEC; F_SETOWN and F_SETSIG would send signals
    "fcntl": ((72, 25), [(1, WHOLE, [*range(8), 36, 37, 38, 1030])]),
    # TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": ((16, 29), [(1, WHOLE, [0x5401, 0x541B, 0x5421, 0x5450, 0x5451])]),
    # PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
    "prctl": ((157, 167), [(0, WHOLE, [3, 15, 16, 0x53564D41])]),
    # of this process
    "prlimit64": ((302, 261), [(0, WHOLE, [0])]),
    # AF_UNIX, SOCK_STREAM; a datagram socket can send elsewhere
    "socketpair": ((53, 199), [(0, WHOLE, [1]), (1, 0xF, [1])]),
}

LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # linux/bpf_common.h
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h
EPERM, ENOSYS = 1, 38
CLONE3 = 435  # its flags are in memory, where no filter sees them; libc then calls clone
X32 = 0x40000000  # the second set of calls of x86-64


def seccomp_filter(machine: str = "") -> bytes | None:
    """Return the filter as a BPF program; None for an architecture without one."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    return b"".join(_program(ARCHITECTURES[machine], column))


def allowed_calls(column: int) -> dict[str, int]:
    """Return numbers by name of the calls without conditions; column 0 is x86-64, 1 aarch64."""
    rows = (row.split("=") for row in ALLOWED.split())
    numbers = ((name, both.split(",")[column]) for name, both in rows)
    return {name: int(number) for name, number in numbers if number}


def _program(architecture: int, column: int) -> Iterator[bytes]:
    yield _step(LOAD, 4)  # seccomp_data.arch
    yield from [_step(EQUAL, architecture, 1, 0), _step(RETURN, KILL)]
    yield _step(LOAD, 0)  # seccomp_data.nr
    yield from _when(AT_LEAST, X32, ERRNO | EPERM)
    yield from _when(EQUAL, CLONE3, ERRNO | ENOSYS)
    for number in allowed_calls(column).values():
        yield from _when(EQUAL, number, ALLOW)
    for numbers, conditions in CONDITIONAL.values():
        if (conditional := numbers[column]) is not None:
            yield from _call(conditional, conditions)
    yield _step(RETURN, ERRNO | EPERM)


def _call(number: int, conditions: list[tuple[int, int, list[int]]]) -> list[bytes]:
    """Allow the call if its arguments meet all conditions; of each, the low 32 bits count."""
    body = []
    for argument, mask, values in conditions:
        body += [_step(LOAD, 16 + 8 * argument), _step(AND, mask)]  # seccomp_data.args
        body += [_step(EQUAL, value, len(values) - at, 0) for at, value in enumerate(values)]
        body.append(_step(RETURN, ERRNO | EPERM))
    body.append(_step(RETURN, ALLOW))
    return [_step(EQUAL, number, 0, len(body)), *body]


def _when(test: int, value: int, verdict: int) -> list[bytes]:
    return [_step(test, value, 0, 1), _step(RETURN, verdict)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
