"""Programs that try to get out of the sandbox. One that succeeds prints ESCAPED.

``VICTIM`` is a file of the caller's, ``PARENT`` the process that started the program.
"""

from dataclasses import dataclass

HEAD = """
import ctypes, errno, os
VICTIM = {victim!r}
PARENT = {parent}
libc = ctypes.CDLL(None, use_errno=True)

def syscall(*arguments):
    "Whether a system call is let through; it may fail for other reasons."
    ctypes.set_errno(0)
    answer = libc.syscall(*arguments)
    return answer >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES)
"""


@dataclass(frozen=True)
class Attack:
    code: str
    shown: str = "all"
    """Users that escape without a sandbox: all, root, or none, if that would do harm."""

    def program(self, victim: str, parent: int) -> str:
        return HEAD.format(victim=victim, parent=parent) + self.code + "\nprint('ESCAPED')\n"


def check(expression: str) -> str:
    return f"assert {expression}"


ATTACKS = {
    # files
    "reads /etc/passwd": Attack("open('/etc/passwd').read()"),
    "reads a file of the caller's": Attack("open(VICTIM).read()"),
    "lists a folder": Attack("os.listdir(os.path.dirname(VICTIM))"),
    "lists /proc": Attack("os.listdir('/proc')"),
    "follows a symbolic link": Attack("os.symlink(VICTIM, 'x'); open('x').read()"),
    "makes a hard link": Attack("os.link(VICTIM, 'x')"),
    "moves a file": Attack("os.rename(VICTIM, 'x'); os.rename('x', VICTIM)", shown="none"),
    "deletes a file": Attack("os.unlink(VICTIM)", shown="none"),
    "writes a file": Attack("open(VICTIM, 'a').write('')"),
    "makes a file": Attack("open(VICTIM + '.new', 'w'); os.unlink(VICTIM + '.new')"),
    "climbs out": Attack("os.listdir('..' + '/..' * 20)"),
    "truncates a file": Attack("os.truncate(VICTIM, 3)"),
    "truncates what it may read": Attack("os.open(os.__file__, os.O_TRUNC)", shown="none"),
    "writes the library": Attack("open(os.__file__, 'r+')", shown="root"),
    "changes a mode": Attack("os.chmod(VICTIM, 0o666)"),
    "changes an owner": Attack("os.chown(VICTIM, os.getuid(), -1)"),
    "changes times": Attack("os.utime(VICTIM, (0, 0))"),
    "sets an attribute": Attack(check("syscall(188, VICTIM.encode(), b'user.x', b'1', 1, 0)")),
    "makes a device": Attack("os.mknod('x', 0o20666, os.makedev(1, 3)); open('x')", shown="root"),
    "opens by handle": Attack(check("syscall(304, -1, None, 0)"), shown="root"),
    "watches a folder": Attack("f = libc.inotify_init(); assert f >= 0"),
    "mounts": Attack(check("syscall(165, b'none', b'/', b'tmpfs', 0, None)"), shown="none"),
    "changes its root": Attack("os.mkdir('x'); os.chroot('x')", shown="root"),
    # network
    "opens a TCP socket": Attack("import socket; socket.socket()"),
    "opens a UDP socket": Attack("import socket; socket.socket(type=socket.SOCK_DGRAM)"),
    "opens a netlink socket": Attack("import socket; socket.socket(16, socket.SOCK_RAW)"),
    "binds an abstract socket": Attack(
        "import socket; s = socket.socket(socket.AF_UNIX); s.bind(b'\\0tiller-%d' % os.getpid())"
    ),
    "pairs datagram sockets": Attack(
        "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"
    ),
    "resolves a name": Attack("import socket; socket.getaddrinfo('localhost', 80)"),
    # processes
    "forks": Attack("os.fork() or os._exit(0)"),
    "forks without end": Attack(
        "import time\nfor n in range(60):\n  os.fork() or (time.sleep(0.3), os._exit(0))"
    ),
    "leaves a daemon": Attack(
        "import time\nif not os.fork():\n  os.setsid()\n"
        "  if not os.fork(): time.sleep(300)\n  os._exit(0)"
    ),
    "clones for its parent": Attack(
        "p = libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0)\nif not p: os._exit(0)\nassert p > 0",
        shown="none",
    ),
    "replaces itself": Attack("os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])"),
    "starts another program": Attack("import subprocess; subprocess.run(['ls'], check=True)"),
    "uses multiprocessing": Attack(
        "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start()"
    ),
    "signals its parent": Attack("os.kill(PARENT, 18)"),
    "signals every process": Attack("os.kill(-1, 9)", shown="none"),
    "signals its parent by a pipe": Attack(
        "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, PARENT)"
    ),
    "chooses the signal of a pipe": Attack("import fcntl; fcntl.fcntl(0, fcntl.F_SETSIG, 9)"),
    "queues a signal": Attack(check("syscall(129, PARENT, 0, None)")),
    "takes a descriptor of its parent": Attack("os.pidfd_open(PARENT)"),
    "traces its parent": Attack(check("syscall(101, 0x4206, PARENT, 0, 0) == 1"), shown="none"),
    "reads its parent's memory": Attack("open(f'/proc/{PARENT}/mem', 'rb')"),
    "reads its parent's environment": Attack("open(f'/proc/{PARENT}/environ', 'rb').read()"),
    "copies its parent's memory": Attack(
        "b = (ctypes.c_ulong * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)\n"
        "ctypes.set_errno(0)\n"
        "assert libc.process_vm_readv(PARENT, b, 1, b, 1, 0) > 0 or ctypes.get_errno() == 14"
    ),
    "limits its parent": Attack(
        "import resource; n = resource.RLIMIT_CPU\n"
        "resource.prlimit(PARENT, n, resource.prlimit(PARENT, n))"
    ),
    "slows its parent": Attack("os.setpriority(0, PARENT, os.getpriority(0, PARENT))"),
    "moves its parent": Attack("os.sched_setaffinity(PARENT, os.sched_getaffinity(PARENT))"),
    # privileges and the kernel
    "becomes root": Attack("os.setuid(0)", shown="root"),
    "changes its groups": Attack("os.setgroups([0])", shown="root"),
    "makes a user namespace": Attack(check("libc.unshare(0x10000000) == 0")),
    "enters a namespace": Attack(check("syscall(308, 0, 0)")),
    "uses io_uring": Attack(check("syscall(425, 1, None)")),
    "loads BPF": Attack(check("syscall(321, 0, None, 0)"), shown="root"),
    "counts events": Attack(check("syscall(298, None, 0, -1, -1, 0)")),
    "handles page faults": Attack(check("syscall(323, 1)")),
    "adds a key": Attack(check("syscall(248, b'user', b'x', b'x', 1, -3)")),
    "names the host": Attack(
        "import socket; socket.sethostname(socket.gethostname())", shown="root"
    ),
    "adds a filter": Attack(check("syscall(157, 22, 0, 0, 0, 0)")),
    "calls by the second ABI": Attack(check("syscall(0x40000000 + 39)"), shown="none"),
    # what stays behind or is shared
    "shares memory": Attack("i = libc.shmget(0, 4096, 0o600); assert libc.shmctl(i, 0, 0) == 0"),
    "shares named memory": Attack(
        "from multiprocessing.shared_memory import SharedMemory as S\n"
        "from multiprocessing import resource_tracker as r; r.register = lambda *a: 0\n"
        "r.unregister = lambda *a: 0\n"
        "s = S(create=True, size=9); s.close(); s.unlink()"
    ),
    "opens a message queue": Attack(
        "n = b'tiller%d' % os.getpid()\n"
        "assert syscall(240, n, 0o102, 0o600, None); libc.syscall(241, n)"
    ),
    "makes a memory file": Attack("os.memfd_create('x')"),
    "reads the caller's input": Attack(check("os.read(0, 1)"), shown="none"),
    "finds descriptors": Attack(
        "found = []\nfor f in range(3, 64):\n"
        "  try: found.append(os.pread(f, 9, 0))\n  except OSError: pass\nassert found",
        shown="none",
    ),
    "finds the caller's environment": Attack(check("'TILLER_SECRET' in os.environ")),
}

MESSES = {
    "nests folders": "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')",
    "closes folders": (
        "import os\nos.mkdir('a'); os.mkdir('a/b'); os.umask(0o777)\n"
        "os.mkdir('x'); os.mkdir('a/x'); open('a/b/c', 'w')"
    ),
    "links to a folder": "import os\nos.symlink(os.path.dirname(VICTIM), 'x')",
    "replaces its output": "import os\nos.lseek(1, 1 << 20, 0); os.write(1, b'x'); os.close(2)",
}
"""Programs that may do what they do, and leave something that is hard to delete or to read."""

LIMITS = {
    # name: (program, limits, the limit that it meets)
    "sleeps": ("import time; time.sleep(60)", {"wall_s": 0.3}, "wall"),
    "spins": ("while True: pass", {"cpu_s": 1}, "cpu"),
    "ignores the limit": (
        "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        {"cpu_s": 1},
        "cpu",
    ),
    "takes memory": ("x = bytearray(1 << 30)", {}, "memory"),
    "takes memory in pieces": ("x = []\nwhile True: x.append(bytes(1 << 20))", {}, "memory"),
    "starts threads": (
        "import threading, time\n"
        "for _ in range(100): threading.Thread(target=time.sleep, args=[9], daemon=True).start()\n"
        "time.sleep(9)",
        {},
        "threads",
    ),
    "writes a large file": (
        "f = open('f', 'wb')\nfor _ in range(64): f.write(bytes(1 << 20))",
        {},
        "disk",
    ),
    "writes many files": (
        "import time\nfor n in range(64): open(str(n), 'wb').write(bytes(1 << 20))\ntime.sleep(9)",
        {},
        "disk",
    ),
    "floods its output": ("while True: print('x' * 9999)", {}, "disk"),
    "prints much": ("print('x' * 99999)", {}, "output"),
    "prints many errors": ("import sys; sys.stderr.write('x' * 99999)", {}, "output"),
}
