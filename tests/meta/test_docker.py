"""The image and the composed services: their parts exist, and the steps of the image run."""

import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from rlake.loop.cli.program import runnable
from tests.support.dockerfile import View, read, stage

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())


def _can_mount() -> bool:
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]
    return os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode


def test_the_image_copies_what_the_package_is_made_of_and_installs_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    steps = list(read(DOCKERFILE))
    copied = {name for one in steps if one.name == "COPY" for name in shlex.split(one.text)[:-1]}
    missing = [name for name in copied if not (ROOT / name).exists()]
    assert missing == []
    package = {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()} - {"tests"}
    assert package | {"pyproject.toml", "setup.py", "__init__.py", "py.typed"} <= copied
    lists = [found for one in steps for found in re.findall(r"'\.\[(.*?)\]'", one.text)]
    extras = ",".join(lists).split(",")
    assert set(extras) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("name", [n for n, s in COMPOSE["services"].items() if "build" in s])
def test_each_service_of_ours_is_a_command_with_options_that_exist(name: str) -> None:
    command, *given = shlex.split(COMPOSE["services"][name]["command"])
    known = runnable().commands[command]
    options = {option for one in known.params for option in one.opts}
    assert {word.split("=")[0] for word in given if word.startswith("--")} <= options


def test_each_port_is_published_on_loopback_only() -> None:
    ports = [port for one in COMPOSE["services"].values() for port in one.get("ports", ())]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not _can_mount(), reason="needs root, and a kernel that lets it mount")
def test_the_steps_of_the_cpu_image_give_a_command_that_trains() -> None:
    # gigabytes, which `tmp_path` may keep in memory
    with TemporaryDirectory(dir="/var/tmp") as folder:
        view = View(Path(folder), context=ROOT)
        # this machine's Python may lie where only its owner may look
        above = "[*Path(sys.base_prefix).parents]"
        view.run(f"chmod o+x $(python3 -c 'import sys; from pathlib import Path; print(*{above})')")
        for one in stage(DOCKERFILE, "cpu"):
            view.do(one, {"TORCH_INDEX": ""})
        _check(view)


def _check(view: View) -> None:
    assert view.user == "rlake"
    view.run("rlake run grpo_digits --set trainer.steps=2")
    steps = view.run("rlake sql --json 'SELECT count(DISTINCT step) AS n FROM draws'")
    assert json.loads(steps) == [{"n": 2}]
    assert view.run("command -v rlake && id -un").split() == ["/opt/rlake/bin/rlake", "rlake"]
