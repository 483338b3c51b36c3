"""A Dockerfile's instructions: read, and run in a copy-on-write view of this machine's files."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    name: str
    """In capitals, such as `RUN`."""
    text: str
    """What follows, on one line."""


def read(path: Path) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, text = line.strip().partition(" ")
            yield Instruction(name.upper(), text.strip())


def stage(path: Path, target: str) -> list[Instruction]:
    """Return the instructions of a stage, after those of the stages that it is built from."""
    stages: dict[str, list[Instruction]] = {}
    name = ""
    for one in read(path):
        if one.name == "FROM":
            image, _, name = one.text.partition(" AS ")
            stages[name] = [*stages.get(image, ())]
        else:
            stages[name].append(one)
    return stages[target]


@dataclass
class View:
    """The root of this machine's files with changes that are kept elsewhere.

    Other than in a container, the system is this machine's and not that of the image in `FROM`.
    """

    folder: Path
    """Holds the changes; on the same file system as an upper layer may be."""
    context: Path
    """Where `COPY` reads."""
    env: dict[str, str] = field(default_factory=dict)
    place: str = "/"
    user: str = "root"

    def do(self, one: Instruction, args: dict[str, str]) -> None:
        """Carry out an instruction; raises CalledProcessError for a `RUN` that fails."""
        match one.name:
            case "RUN":
                self.run(one.text)
            case "ENV":
                pairs = (pair.split("=", 1) for pair in shlex.split(one.text))
                self.env |= {name: self._expanded(value) for name, value in pairs}
            case "ARG":
                name, _, value = one.text.partition("=")
                self.env[name] = args.get(name, value)
            case "WORKDIR":
                self.place = one.text
                self.run(f"mkdir -p {one.text}", place="/")
            case "COPY":
                self._copy(*shlex.split(one.text))
            case "USER":
                self.user = one.text
            case _:  # what a container does when it starts
                assert one.name in ("VOLUME", "ENTRYPOINT", "CMD", "EXPOSE", "HEALTHCHECK"), one

    def run(self, command: str, *, place: str | None = None) -> str:
        """Return what a shell command prints in the view."""
        upper, work, root = (self.folder / name for name in ("upper", "work", "root"))
        for path in (upper, work, root):
            path.mkdir(exist_ok=True)
        inside = f"cd {place or self.place} && {command}"
        if self.user != "root":
            become = f"exec setpriv --reuid {self.user} --regid {self.user} --init-groups"
            inside = f"{become} sh -ec {shlex.quote(inside)}"
        script = (
            f"mount -t overlay overlay -o lowerdir=/,upperdir={upper},workdir={work} {root} && "
            f"mount --rbind /dev {root}/dev && mount -t proc proc {root}/proc && "
            f"exec chroot {root} sh -ec {shlex.quote(inside)}"
        )
        kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_"))}
        env = {"PATH": os.environ["PATH"], "HOME": "/root"} | kept | self.env
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "sh", "-c", script],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _expanded(self, text: str) -> str:
        known = os.environ | self.env
        return re.sub(r"\$(\w+)", lambda found: known.get(found[1], ""), text)

    def _copy(self, *paths: str) -> None:
        to = self.folder / "upper" / self.place.lstrip("/")
        for source in paths[:-1]:
            path = self.context / source
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, to / paths[-1], dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy(path, to / paths[-1])
