"""Rows pushed to a hub and imported from it, by the real clients over HTTP."""

import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import polars as pl
import pytest
from support import hub
from support.builders import experiences
from support.commands import Command
from support.tiny_models import config

from rlake.loop.run import run
from rlake.store import Store, connect


def rlake_of(address: str, folder: Path, *words: str, token: str = "hf_right") -> tuple[int, str]:
    """Run a command in a process of its own: the clients read the hub's address when imported."""
    settings = {
        "HF_ENDPOINT": address,
        "HF_HOME": str(folder / "home"),
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "rlake.loop.cli", *words],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_rows_are_pushed_to_a_hub_and_imported_from_it(lake: Store, tmp_path: Path) -> None:
    lake.append("experiences", experiences(3, reward=[1.0, 0.0, 1.0]))
    words = ["export", "experiences", "--store", lake.uri, "--push", "lab/sums"]
    query = ["--sql", "SELECT '1+1=' AS prompt_text, reward FROM experiences"]
    with hub.running() as (address, server):
        code, printed = rlake_of(address, tmp_path, *words, *query, token="hf_wrong")
        assert code != 0
        assert "cannot push to `lab/sums`" in printed
        assert server.repositories == {}
        code, printed = rlake_of(address, tmp_path, *words, *query)
        assert code == 0, (printed, server.unknown)
        assert "wrote 3 rows to lab/sums" in printed
        assert [one["visibility"] for one in server.created] == ["private"]
        file = server.repositories["lab/sums"]["data/train-00000-of-00001.parquet"]
        assert pl.read_parquet(BytesIO(file)).height == 3
        other = str(tmp_path / "other")
        source = ["import", "experiences", "hf://lab/sums", "--store", other]
        code, printed = rlake_of(address, tmp_path, *source)
        assert code == 0, (printed, server.unknown)
        code, printed = rlake_of(address, tmp_path, "import", "tasks", "hf://lab/smus")
        assert code != 0
        assert "cannot read the dataset `lab/smus`" in printed
    columns = "SELECT reward FROM experiences ORDER BY ALL"
    assert connect(other).sql(columns).fetchall() == lake.sql(columns).fetchall()


@pytest.mark.slow
def test_a_model_is_pushed_with_its_tokenizer(lake: Store, tmp_path: Path) -> None:
    run(lake, config(trainer={"steps": 1}))
    with hub.running() as (address, server):
        words = ["export", "model", "demo", "--store", lake.uri, "--push", "lab/policy", "--public"]
        code, printed = rlake_of(address, tmp_path, *words)
        assert code == 0, (printed, server.unknown)
        assert [one["visibility"] for one in server.created] == ["public"]
        pushed = server.repositories["lab/policy"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= pushed.keys()
    [version] = lake.sql("SELECT path FROM policies_current WHERE policy_version = 1").fetchall()
    assert lake.runs_folder is not None
    kept = lake.runs_folder / "demo" / version[0] / "model.safetensors"
    assert pushed["model.safetensors"] == kept.read_bytes()


def test_an_export_goes_to_one_place(rlake: Command, lake: Store) -> None:
    for words in ([], ["--out", "a.jsonl", "--push", "lab/sums"]):
        done = rlake("export", "experiences", *words)
        assert done.returncode == 2
        assert "an export goes to one place" in done.stderr
