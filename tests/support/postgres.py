"""A real PostgreSQL server with a database of its own, where its programs are installed."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket

import pytest

PASSWORD = "secret word"


class Postgres:
    """A server on loopback; `uri` names its database `lab`, with user and password."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._data, self._programs = folder / "data", programs
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"postgresql://me:secret%20word@127.0.0.1:{self.port}/lab"
        # PostgreSQL refuses to run as root
        self._user = "postgres" if os.geteuid() == 0 else None
        self._data.mkdir(parents=True)
        if self._user:
            for own in (folder, self._data):
                shutil.chown(own, self._user)
            for above in folder.parents:
                if not above.stat().st_mode & 0o005:
                    above.chmod(0o755)
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        self._call("initdb", "-U", "me", "-A", "scram-sha-256", f"--pwfile={secret}", "--no-sync")
        options = f"-p {self.port} -k '' -h 127.0.0.1 -c fsync=off"
        self._call("pg_ctl", "start", "-w", "-t", "60", "-l", str(folder / "log"), "-o", options)
        self.sql("CREATE DATABASE lab", database="postgres")

    def sql(self, query: str, *, database: str = "lab") -> list[str]:
        """Return the lines that psql prints."""
        address = self.uri.replace("/lab", f"/{database}")
        done = subprocess.run(
            [self._programs / "psql", "-At", "-v", "ON_ERROR_STOP=1", "-c", query, address],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def kill(self) -> None:
        """End the server at once, and all connections with it."""
        self._call("pg_ctl", "stop", "-m", "immediate", "-w", "-t", "60")

    @property
    def is_running(self) -> bool:
        """Whether the server runs."""
        return (self._data / "postmaster.pid").exists()

    def _call(self, program: str, *words: str) -> None:
        command = [str(self._programs / program), "-D", str(self._data), *words]
        done = subprocess.run(
            command,
            user=self._user,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a pipe would be held by the server
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, command


@contextmanager
def running(folder: Path) -> Iterator[Postgres]:
    """Run a server in a folder; skips the test where PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    initdb = shutil.which("initdb") or (found[-1] if found else None)
    if initdb is None:
        pytest.skip("needs PostgreSQL: apt-get install postgresql")
    server = Postgres(folder, Path(initdb).resolve().parent)
    try:
        yield server
    finally:
        if server.is_running:
            server.kill()
