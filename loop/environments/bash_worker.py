"""The program that runs a command for `bash`; its text is what the sandbox runs.

It reads a request as JSON: the folder (`state`, or `files` and the command `setup` that make it),
the `command`, the folder to run it in (`cwd`), and its limits. It prints JSON: what the command
printed and how it ended, all files before and after it, and the state of the one in `keep`.
"""

import base64
import hashlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_HOME = Path("home").absolute()


def main() -> None:
    """Answer a request."""
    asked = json.load(sys.stdin)
    _HOME.mkdir()
    if asked["state"] is None:
        why = _made(asked)
        if why:
            print(json.dumps({"unmade": why}))  # noqa: T201
            return
    else:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(asked["state"]))) as tar:
            # the sandbox holds whatever is in it; the default of Python 3.14 changes modes
            tar.extraction_filter = lambda member, path: member
            tar.extractall(_HOME)
    # before the command, which may change what it likes
    before, states = _files(), {}
    if asked["keep"] == "before":
        states["before"] = _state()
    ended = _run(asked["command"], asked["cwd"], asked)
    if asked["keep"] == "after":
        states["after"] = _state()
    reply = {**ended, "before": before, "after": _files(), "state": states[asked["keep"]]}
    print(json.dumps(reply))  # noqa: T201


def _made(asked: dict[str, Any]) -> str:
    """Write the files and run the setup; return why it failed."""
    for name, text in asked["files"].items():
        path = _HOME / name
        folder = path if name.endswith("/") else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if folder != path:
            path.write_text(text, encoding="utf-8")
    ended = _run(asked["setup"], "", asked)
    how = "takes too long" if ended["code"] is None else f"ends with status {ended['code']}"
    return f"{how}: {ended['output'][-300:]}" if ended["code"] != 0 else ""


def _run(command: str, cwd: str, limits: dict[str, Any]) -> dict[str, Any]:
    # files, since what goes on in the background would keep a pipe open
    with tempfile.TemporaryFile(dir=".") as printed, tempfile.TemporaryFile(dir=".") as where:
        process = subprocess.Popen(
            ["/bin/bash", "--norc", "-c", f"trap 'pwd -P >&{where.fileno()}' EXIT\n{command}"],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            # the last command may have removed the folder that it went to
            cwd=cwd if cwd and Path(cwd).is_dir() else _HOME,
            env={"PATH": "/usr/bin:/bin", "HOME": str(_HOME), "LANG": "C.UTF-8"},
            pass_fds=[where.fileno()],
            start_new_session=True,
        )
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(limits["seconds"])
        with suppress(OSError):  # what it left in the background, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        size = printed.seek(0, os.SEEK_END)
        printed.seek(0)
        output = printed.read(limits["most"]).decode(errors="replace")
        where.seek(0)
        ended_in = where.read(4096).decode(errors="replace").strip()
    # bash that was killed, or became another program, does not say where it ended
    ended_in = ended_in or cwd
    return {"output": output, "cut": max(size - limits["most"], 0), "code": code, "cwd": ended_in}


def _files() -> dict[str, str]:
    """Describe all below the folder, by path: their kind, who may run them, and their content."""
    return {str(path.relative_to(_HOME)): _described(path) for path in _below(_HOME)}


def _described(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"link {path.readlink()}"
    if stat.S_ISDIR(mode):
        return "folder"
    if not stat.S_ISREG(mode):
        return "other"
    digest = hashlib.sha256(_content(path)).hexdigest()
    return f"{'program' if mode & stat.S_IXUSR else 'file'} {digest}"


def _state() -> str:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz", compresslevel=1) as tar:
        for path in _below(_HOME):
            # tar has no sockets, and nobody listens any more
            if not path.is_socket():
                info = tar.gettarinfo(path, str(path.relative_to(_HOME)))
                tar.addfile(info, io.BytesIO(_content(path)) if info.isreg() else None)
    return base64.b64encode(made.getvalue()).decode()


def _below(folder: Path) -> Iterator[Path]:
    if folder.is_symlink():  # a command put it in the folder's place
        return
    for path in sorted(folder.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            with _readable(path):
                yield from _below(path)


def _content(path: Path) -> bytes:
    with _readable(path):
        return path.read_bytes()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Let a file or folder be read that the command has closed to itself."""
    mode = stat.S_IMODE(path.stat().st_mode)
    wanted = mode | (0o500 if path.is_dir() else 0o400)
    if wanted == mode:
        yield
        return
    path.chmod(wanted)
    try:
        yield
    finally:
        path.chmod(mode)


if __name__ == "__main__":
    main()
