"""The program that confines itself, then runs `main.py` of a folder; it is run as a file.

It makes namespaces (user, mount, process, network, IPC), a root of Python's own folders, read
only, and of memory; sets the limits; becomes a user without rights; refuses all system calls but
those of a list; and starts Python anew. It stays outside, looks at the memory that all have
together, ends everything after the time allowed, and writes how it went to a pipe.
"""

import ctypes
import json
import os
import resource
import select
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
_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/etc/alternatives")
_SHARED = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/etc/ld.so.cache")
_NEWEST = 424
"""Calls from this number on fail with ENOSYS, as in older kernels, so that programs fall back."""
_LOOK_SECONDS = 0.05
"""How often the memory of all processes together is looked at."""
_READ = 1 | 4 | 8
"""Rights of Landlock: to execute, and to read files and folders."""

_libc = ctypes.CDLL(None, use_errno=True)


class Stop(Exception):
    """The time is over, or nobody wants to know any more."""


class TooMuch(Exception):
    """All processes together hold more memory than they may."""


def main() -> None:
    """Run the code, and tell how it ended."""
    limits = json.loads(sys.argv[1])
    # closed when Python starts anew: the code must not be able to write how it ended
    os.set_inheritable(limits["tells"], False)  # noqa: FBT003
    said: dict[str, Any] = {}
    # the code must not outlive a killed rlake
    _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGALRM, _stop)
    signal.signal(signal.SIGTERM, _stop)
    # without a Python handler, nothing would be written to the pipe that wakes `_watched`
    signal.signal(signal.SIGCHLD, lambda *_: None)
    awake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    child, (inner, tells) = 0, os.pipe()
    processes = os.open("/proc", os.O_DIRECTORY)  # the namespace has none
    try:
        said["isolated"] = limits["namespaces"] and _unshare()
        # processes whose parent has ended become ours, not init's, so that `_below` finds them
        _libc.prctl(_SUBREAPER, 1)
        child = os.fork() or _inside(limits, tells, isolated=said["isolated"])
        os.close(tells)
        signal.setitimer(signal.ITIMER_REAL, limits["seconds"])
        said["code"] = _watched(child, limits["memory"], processes, awake)
        child = 0
        said |= json.loads(os.read(inner, 4096) or b"{}")
    except Stop:
        said["late"] = True
    except TooMuch:
        said["much"] = True
    except OSError as error:
        said["refused"] = str(error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _end_all({child} - {0}, processes)
    os.write(limits["tells"], json.dumps(said).encode())


def _stop(*_: object) -> NoReturn:
    raise Stop


def _watched(child: int, memory: int, processes: int, awake: int) -> int:
    pause = _LOOK_SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if select.select([awake], [], [], pause)[0]:
            os.read(awake, 4096)
            continue
        began = time.monotonic()
        if sum(_holds(one, processes) for one in _below(processes)) > memory:
            raise TooMuch
        # looking takes at most a twentieth of the time, however many processes there are
        pause = max(_LOOK_SECONDS, 20 * (time.monotonic() - began))


def _holds(process: int, processes: int) -> int:
    # what is shared counts in shares, where the kernel tells them
    for name, keys, unit in (("smaps_rollup", ("Pss:", "SwapPss:"), 1024), ("statm", (), 4096)):
        with suppress(OSError, ValueError, IndexError):
            text = _read(processes, f"{process}/{name}")
            if not keys:
                return int(text.split()[1]) * unit
            return unit * sum(
                int(line.split()[1]) for line in text.splitlines() if line.startswith(keys)
            )
    return 0


def _read(folder: int, name: str) -> str:
    opened = os.open(name, os.O_RDONLY, dir_fd=folder)
    with os.fdopen(opened, "rb") as file:
        return file.read().decode("utf-8", "replace")


def _unshare() -> bool:
    user, group = os.geteuid(), os.getegid()
    # root needs no user namespace; where a container refuses it these, one is tried below
    if user == 0 and _libc.unshare(_OTHERS) == 0:
        return True
    if _libc.unshare(_USER | _OTHERS) != 0:
        return False
    # before the groups: the kernel refuses `gid_map` to a user without rights otherwise
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    return True


def _inside(limits: dict[str, Any], tells: int, *, isolated: bool) -> NoReturn:
    """Be the first process of the namespace: whatever is left when it ends is killed.

    It tells how the code ended by a pipe that the code has not: an exit status anyone may choose.
    """
    try:
        signal.set_wakeup_fd(-1)
        for one in (signal.SIGALRM, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(one, signal.SIG_DFL)
        if not isolated:
            _start(limits, isolated=False)
        _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)  # again: a fork does not inherit it
        _new_root(limits)
        child = os.fork()
        if child == 0:
            os.setsid()  # so that signals to its group reach none of us
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
    # private, or the mounts below would appear outside of the namespace too
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
            # again: the first bind ignores all flags, read-only included
            _mount(None, str(inner), None, _BIND | _REMOUNT | _READ_ONLY | _NOSUID | _NODEV)
    for name in ("work", "tmp", "old", "dev"):
        Path(folder, name).mkdir(exist_ok=True)  # Python may be installed below one of them
        Path(folder, name).chmod(0o777)
    Path(folder, "dev/null").touch()
    _mount("/dev/null", f"{folder}/dev/null", None, _BIND)
    Path(folder, "work/main.py").write_bytes(source)
    os.chdir(folder)
    # not `chroot`, which a process with rights can leave
    _check(_libc.pivot_root(b".", b"old"), "pivot_root")
    os.chdir("/work")
    _check(_libc.umount2(b"/old", _DETACH), "umount2")
    Path("/old").rmdir()


def _start(limits: dict[str, Any], *, isolated: bool) -> NoReturn:
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    calls = limits["calls"]["isolated" if isolated else "bare"]
    if not isolated:
        is_kept = limits["landlock"] and _refuse_files(limits["folder"]) and calls
        if not is_kept and not limits["unconfined"]:
            raise OSError("the kernel makes no namespaces here, and cannot keep files from it")
    if os.geteuid() == 0:
        if not isolated:
            os.chown(limits["folder"], NOBODY, NOBODY)
        # in this order: another user may change neither groups nor the group
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
    # last: the filter also refuses what was done above
    if calls:
        _refuse_calls(calls)
    # not the one of a virtual environment, whose folder is not there
    python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]  # pyright: ignore
    os.execve(python, [python, "-I", "-B", "main.py"], {"PATH": "/usr/bin", "LANG": "C.UTF-8"})


def _refuse_calls(calls: dict[str, Any]) -> None:
    """Let the kernel refuse all calls but some to this process and all that it starts (seccomp)."""
    load, equal, at_least, more, any_bit, give = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
    refuse, missing, allow = 0x00050000 | 1, 0x00050000 | 38, 0x7FFF0000
    # the architecture first: for a 32-bit program the numbers stand for other calls
    steps = [(load, 0, 0, 4), (equal, 1, 0, calls["audit"]), (give, 0, 0, refuse), (load, 0, 0, 0)]
    # x32: the calls of a 64-bit program under other numbers
    steps += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]
    for first, last in _runs(calls["numbers"]):
        steps += [(at_least, 0, 2, first), (more, 1, 0, last), (give, 0, 0, allow)]
    for number, place, values, bits in calls["ruled"]:
        looks = [(load, 0, 0, 16 + 8 * place)]  # its lower half: none of these reads the upper
        if place == 4:  # an address, of which both halves count
            looks += [(equal, 1, 0, 0), (give, 0, 0, refuse), (load, 0, 0, 20 + 8 * place)]
        if bits:
            looks += [(any_bit, 1, 0, bits), (give, 0, 0, allow)]
        for value in values:
            looks += [(equal, 0, 1, value), (give, 0, 0, allow)]
        looks += [(give, 0, 0, refuse)]
        steps += [(equal, 0, len(looks), number), *looks]
    steps += [(at_least, 0, 1, _NEWEST), (give, 0, 0, missing), (give, 0, 0, refuse)]
    packed = b"".join(
        code.to_bytes(2, "little") + bytes([true, false]) + value.to_bytes(4, "little")
        for code, true, false, value in steps
    )
    text = ctypes.create_string_buffer(packed, len(packed))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    program = Program(len(steps), ctypes.addressof(text))
    _check(_libc.prctl(_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _refuse_files(folder: str) -> bool:
    """Refuse all files but Python's and a folder's, by Landlock; False where there is none."""
    # its version: rights that the kernel does not know yet make the rule set invalid
    newest = _libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if newest < 1:
        return False
    every = (1 << (13 + (newest > 1) + (newest > 2) + (newest > 4))) - 1
    handled = every.to_bytes(8, "little") + ((3 if newest > 3 else 0).to_bytes(8, "little"))
    size = ctypes.c_size_t(16 if newest > 3 else 8)
    rules = _libc.syscall(444, handled, size, 0)
    _check(min(rules, 0), "landlock_create_ruleset")
    python = (*_FOLDERS, os.path.realpath(sys.base_prefix))
    allowed = dict.fromkeys(python, _READ) | dict.fromkeys(_SHARED, 2 | 4) | {folder: every}
    for path, rights in allowed.items():
        if Path(path).exists():
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            message = (rights & every).to_bytes(8, "little") + opened.to_bytes(4, "little")
            _check(_libc.syscall(445, rules, 1, message, 0), f"landlock_add_rule {path}")
            os.close(opened)
    _check(_libc.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)
    return True


def _end_all(children: set[int], processes: int) -> None:
    """Kill all that is left below this process, also what has left its session.

    All are stopped before the first is killed: what goes on while others are killed may multiply.
    Of namespaces the first process is killed, with which all others end.
    """
    until = time.monotonic() + 2
    stopped: set[int] = set()
    while (new := (children | _below(processes)) - stopped) and time.monotonic() < until:
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


def _below(processes: int) -> set[int]:
    """Return all processes that come from this one."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir(processes)):
        with suppress(OSError, ValueError):
            # after the last bracket: the program's name before it may hold brackets and spaces
            state, parent = _read(processes, f"{name}/stat").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(name))
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
