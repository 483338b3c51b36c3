"""The image and the composed services: their parts exist, and the steps of the image run."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from time import monotonic
from typing import Any

import httpx
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


@pytest.mark.long
@pytest.mark.timeout(3600)  # vLLM and torch for GPUs are several GB
@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.skipif(not _can_mount(), reason="needs root, and a kernel that lets it mount")
def test_the_steps_of_an_image_give_a_command_that_trains(target: str) -> None:
    # gigabytes, which `tmp_path` may keep in memory
    with TemporaryDirectory(dir="/var/tmp") as folder:
        view = View(Path(folder), context=ROOT)
        # this machine's Python may lie where only its owner may look
        above = "[*Path(sys.base_prefix).parents]"
        view.run(f"chmod o+x $(python3 -c 'import sys; from pathlib import Path; print(*{above})')")
        for one in stage(DOCKERFILE, target):
            view.do(one, {"TORCH_INDEX": ""})
        _check(view)


def _check(view: View) -> None:
    assert view.user == "rlake"
    view.run("rlake run grpo_digits --set trainer.steps=2")
    steps = view.run("rlake sql --json 'SELECT count(DISTINCT step) AS n FROM draws'")
    assert json.loads(steps) == [{"n": 2}]
    assert view.run("command -v rlake && id -un").split() == ["/opt/rlake/bin/rlake", "rlake"]


def _can_build() -> bool:
    """Return whether a daemon of docker answers."""
    return (
        bool(shutil.which("docker"))
        and not subprocess.run(["docker", "info"], capture_output=True).returncode
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not _can_build(), reason="needs a daemon of docker")
def test_the_cpu_image_is_built_and_trains() -> None:
    build = ["docker", "build", "-f", str(DOCKERFILE), "--target", "cpu", "-t", "rlake:test"]
    subprocess.run([*build, str(ROOT)], check=True)
    run = ["docker", "run", "--rm", "rlake:test", "run", "grpo_digits", "--set", "trainer.steps=2"]
    subprocess.run(run, check=True)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_services_work_together_on_one_store(tmp_path: Path) -> None:
    """The commands of the composed services, on this machine: other folders, ports and hosts."""
    ports = {"5000": str(_free_port()), "8012": str(_free_port())}
    changes = {"mlflow:5000": f"127.0.0.1:{ports['5000']}", "/mlflow/": f"{tmp_path}/", **ports}

    def here(text: str) -> str:
        for old, new in changes.items():
            text = text.replace(old, new)
        return text

    def words(name: str) -> list[str]:
        return shlex.split(here(COMPOSE["services"][name]["command"]))

    programs = Path(sys.executable).parent
    given = COMPOSE["services"]["run"]["environment"]
    env = os.environ | {"RLAKE_STORE": str(tmp_path / "lake")}
    env |= {name: here(value) for name, value in given.items()}
    command = words("mlflow")
    command[0] = str(programs / command[0])
    mlflow = f"http://127.0.0.1:{ports['5000']}"
    with (tmp_path / "mlflow.txt").open("wb") as said:
        server = subprocess.Popen(
            command, stdout=said, stderr=said, start_new_session=True, cwd=tmp_path
        )
    try:
        _until_healthy(f"{mlflow}/health")
        rlake = [sys.executable, "-m", "rlake.loop.cli"]
        steps = ["--set", "trainer.steps=2"]
        subprocess.run([*rlake, *words("run"), *steps], env=env, check=True, cwd=tmp_path)
        asked = {"experiment_ids": ["0", "1"]}
        runs = httpx.post(f"{mlflow}/api/2.0/mlflow/runs/search", json=asked, timeout=60).json()
        logged = {one["key"] for run in runs["runs"] for one in run["data"]["metrics"]}
        assert {"train/reward_mean", "explore/reward_mean"} <= logged
        studio = [*rlake, *words("studio")]
        with subprocess.Popen(studio, env=env, stdout=subprocess.PIPE, text=True) as shown:
            try:
                assert shown.stdout is not None
                token = re.search(r"\?token=[\w-]+", shown.stdout.readline())
                assert token is not None
                address = f"http://127.0.0.1:{ports['8012']}/run{token[0]}&id=grpo_digits"
                page = httpx.get(address, follow_redirects=True, timeout=60)
                assert page.status_code == 200
                assert "grpo_digits" in page.text
            finally:
                shown.kill()
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _until_healthy(address: str) -> None:
    """Wait until a server answers, for 200 s: it starts in seconds on a machine that is idle."""
    end = monotonic() + 200
    while monotonic() < end:
        try:
            if httpx.get(address, timeout=10).status_code == 200:
                return
        except httpx.TransportError:
            Event().wait(0.2)
    pytest.fail(f"{address} never answered")
