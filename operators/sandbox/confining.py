"""The program that confines itself, then runs `main.py` of a folder; it is run as a file.

It makes namespaces (user, mount, process, network, IPC), a root of Python's own folders, read
only, and of memory; sets the limits; becomes a user without rights; and starts Python anew. It
stays outside, ends everything after the time allowed, and writes how it went to a pipe.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

NOBODY = 65534
_USER, _OTHERS = 0x10000000, 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000
"""Flags of unshare: the user namespace; those of mounts, processes, network and IPC."""
_NOSUID, _NODEV, _READ_ONLY, _REMOUNT, _BIND = 2, 4, 1, 32, 4096
_EVERYWHERE, _DETACH = 16384 | (1 << 18), 2
_DEATH_SIGNAL, _NO_NEW_PRIVILEGES, _SUBREAPER, _SECCOMP = 1, 38, 36, 22
_FOLDERS = ("/usr", "/lib", "/lib64", "/bin")
_REFUSED = {
    "x86_64": (0xC000003E, (41, 62, 101, 129, 200, 234, 297, 311, 424)),
    "aarch64": (0xC00000B7, (198, 129, 117, 138, 130, 131, 240, 271, 424)),
}
"""By processor: its audit number, and the numbers of socket, kill, ptrace, rt_sigqueueinfo, tkill,
tgkill, rt_tgsigqueueinfo, process_vm_writev and pidfd_send_signal."""

_libc = ctypes.CDLL(None, use_errno=True)


class Stop(Exception):
    """The time is over, or nobody wants to know any more."""


def main() -> None:
    """Run the code, and tell how it ended."""
    limits = json.loads(sys.argv[1])
    os.set_inheritable(limits["tells"], False)  # noqa: FBT003
    said: dict[str, Any] = {}
    _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGALRM, _stop)
    signal.signal(signal.SIGTERM, _stop)
    child, (inner, tells) = 0, os.pipe()
    try:
        said["isolated"] = limits["namespaces"] and _unshare()
        _libc.prctl(_SUBREAPER, 1)
        child = os.fork() or _inside(limits, tells, isolated=said["isolated"])
        os.close(tells)
        signal.setitimer(signal.ITIMER_REAL, limits["seconds"])
        said["code"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        child = 0
        said |= json.loads(os.read(inner, 4096) or b"{}")
    except Stop:
        said["late"] = True
    except OSError as error:
        said["refused"] = str(error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _end_all({child} - {0})
    os.write(limits["tells"], json.dumps(said).encode())


def _stop(*_: object) -> NoReturn:
    raise Stop


def _unshare() -> bool:
    user, group = os.geteuid(), os.getegid()
    if user == 0 and _libc.unshare(_OTHERS) == 0:
        return True
    if _libc.unshare(_USER | _OTHERS) != 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    return True


def _inside(limits: dict[str, Any], tells: int, *, isolated: bool) -> NoReturn:
    """Be the first process of the namespace: whatever is left when it ends is killed.

    It tells how the code ended by a pipe that the code has not: an exit status anyone may choose.
    """
    try:
        for one in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(one, signal.SIG_DFL)
        if not isolated:
            _start(limits, isolated=False)
        _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        _new_root(limits)
        child = os.fork()
        if child == 0:
            _start(limits, isolated=True)
        while True:
            ended, status = os.wait()
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                os.write(tells, json.dumps({"code": code}).encode())
                os._exit(0)
    except BaseException as error:  # noqa: BLE001 - nothing may go on outside of what was prepared
        why = f"{type(error).__name__}: {error}"[:1000]
        os.write(tells, json.dumps({"refused": why}).encode())
        os._exit(1)


def _new_root(limits: dict[str, Any]) -> None:
    folder = limits["folder"]
    source = Path(folder, "main.py").read_bytes()
    _mount(None, "/", None, _EVERYWHERE)
    size = f"size={limits['disk']},nr_inodes=4096,mode=755"
    _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, size)
    for name in dict.fromkeys((*_FOLDERS, os.path.realpath(sys.base_prefix))):
        inner = Path(folder + name)
        if Path(name).is_symlink():
            inner.symlink_to(Path(name).readlink())
        elif Path(name).is_dir() and not inner.exists():
            inner.mkdir(parents=True)
            _mount(name, str(inner), None, _BIND)
            _mount(None, str(inner), None, _BIND | _REMOUNT | _READ_ONLY | _NOSUID | _NODEV)
    for name in ("work", "tmp", "old", "dev"):
        Path(folder, name).mkdir(exist_ok=True)  # Python may be installed below one of them
        Path(folder, name).chmod(0o777)
    Path(folder, "dev/null").touch()
    _mount("/dev/null", f"{folder}/dev/null", None, _BIND)
    Path(folder, "work/main.py").write_bytes(source)
    os.chdir(folder)
    _check(_libc.pivot_root(b".", b"old"), "pivot_root")
    os.chdir("/work")
    _check(_libc.umount2(b"/old", _DETACH), "umount2")
    Path("/old").rmdir()


def _start(limits: dict[str, Any], *, isolated: bool) -> NoReturn:
    if not isolated:
        _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _refuse_calls()
    if os.geteuid() == 0:
        if not isolated:
            os.chown(limits["folder"], NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        if isolated:  # so that its processes are counted apart from those of other sandboxes
            _check(_libc.unshare(_USER), "unshare")
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    seconds = int(limits["seconds"]) + 1
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["disk"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]  # pyright: ignore
    os.execve(python, [python, "-I", "-B", "main.py"], {"PATH": "/usr/bin", "LANG": "C.UTF-8"})


def _refuse_calls() -> None:
    """Let the kernel refuse sockets and signals to this process and all that it starts (seccomp).

    Signals, since without namespaces the code may be the same user as whoever started it.
    """
    audit, calls = _REFUSED[os.uname().machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    refuse, allow = 0x00050000 | 1, 0x7FFF0000
    last = len(calls)
    steps = [(load, 0, 0, 4), (equal, 0, last + 3, audit), (load, 0, 0, 0)]
    steps += [(at_least, last + 1, 0, 0x40000000)]
    steps += [(equal, last - i, 0, call) for i, call in enumerate(calls)]
    steps += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    packed = b"".join(
        code.to_bytes(2, "little") + bytes([true, false]) + value.to_bytes(4, "little")
        for code, true, false, value in steps
    )
    text = ctypes.create_string_buffer(packed, len(packed))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    program = Program(len(steps), ctypes.addressof(text))
    _check(_libc.prctl(_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def _end_all(children: set[int]) -> None:
    """Kill all that is left below this process, also what has left its session.

    All are stopped before the first is killed: what goes on while others are killed may multiply.
    Of namespaces the first process is killed, with which all others end; there is no `/proc` then.
    """
    until = time.monotonic() + 2
    stopped: set[int] = set()
    while (new := (children | _below()) - stopped) and time.monotonic() < until:
        for one in new:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGSTOP)
        stopped |= new
    for one in stopped:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    with suppress(ChildProcessError):
        while time.monotonic() < until:  # those that others leave come to us
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.001)


def _below() -> set[int]:
    """Return all processes that come from this one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, left = set[int](), children.get(os.getpid(), [])
    while left:
        found.add(one := left.pop())
        left += children.get(one, [])
    return found


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [None if t is None else t.encode() for t in (source, target, kind)]
    _check(_libc.mount(*texts, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
