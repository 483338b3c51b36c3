"""The recipe `sft_gsm8k`: imported right solutions teach a tiny model, from the store, offline."""

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.gsm8k import imports

from rlake.loop.cli import run_command
from rlake.store import Store, connect

SMALL = [
    "trainer.steps=40",
    "model.from_scratch.layers=1",
    "model.from_scratch.hidden_size=48",
    "model.from_scratch.max_length=320",
]
"""A few seconds' worth: most of GSM8K's solutions are too long for this model."""

HELD_OUT = "source = 'imported' AND reward >= 1 AND right(task_id, 1) = '0'"

Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def imported(gsm8k: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a store that holds it all, to be copied."""
    place = tmp_path_factory.mktemp("gsm8k") / "lake"
    for command in imports(gsm8k):
        assert run_command([*command, "--store", str(place)]) == 0
    return place


@pytest.fixture
def lake(imported: Path, tmp_path: Path) -> Store:
    shutil.copytree(imported, tmp_path / "lake")
    return connect(tmp_path / "lake")


@pytest.fixture
def train(lake: Store, capsys: pytest.CaptureFixture[str]) -> Train:
    """Run `rlake train sft_gsm8k` and return what `--json` says."""

    def call(*overrides: str) -> dict[str, Any]:
        capsys.readouterr()
        changes = [word for text in overrides for word in ("--set", text)]
        assert run_command(["train", "sft_gsm8k", "--store", lake.uri, "--json", *changes]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


def test_the_held_out_loss_falls(train: Train) -> None:
    told = train(*SMALL)
    assert told["steps"] == 40
    assert told["held_out_loss_before"] == pytest.approx(math.log(108), abs=0.2)  # knows nothing
    assert told["held_out_loss_after"] < told["held_out_loss_before"] - 1.0


def test_it_learns_from_right_solutions_and_never_from_held_out_questions(
    lake: Store, train: Train
) -> None:
    train(*SMALL, "trainer.steps=20")
    drawn = (
        "FROM draws_current d JOIN experiences e USING (experience_id) JOIN tasks t USING (task_id)"
    )
    [(rows, right, imported)] = lake.sql(
        "SELECT count(DISTINCT experience_id), count(*) FILTER (e.reward >= 1), "
        f"count(*) FILTER (e.source = 'imported') {drawn}"
    ).fetchall()
    assert rows == right == imported == 160
    assert not lake.sql(
        f"SELECT t.prompt_text {drawn} INTERSECT "
        f"SELECT prompt_text FROM experiences WHERE {HELD_OUT}"
    ).fetchall()
    assert lake.sql(f"SELECT 1 FROM experiences WHERE {HELD_OUT}").fetchall()


def test_solutions_too_long_for_the_model_are_on_record_with_weight_zero(
    lake: Store, train: Train
) -> None:
    train(*SMALL, "trainer.steps=20", "model.from_scratch.max_length=288")
    wrong = lake.sql(
        "SELECT d.weight, length(e.prompt_text) + length(e.response_text) + 1 AS tokens "
        "FROM draws_current d JOIN experiences e USING (experience_id) "
        "WHERE weight <> (tokens <= 288)::INT"
    ).fetchall()
    weights = {w for (w,) in lake.sql("SELECT DISTINCT weight FROM draws_current").fetchall()}
    assert not wrong
    assert weights == {0.0, 1.0}


@pytest.mark.long
def test_one_pass_over_the_right_solutions_tells_far_more_than_which_characters_are_frequent(
    lake: Store, train: Train
) -> None:
    told = train()
    [(right, short)] = lake.sql(
        "SELECT count(*), count(*) FILTER (length(prompt_text) + length(response_text) < 640) "
        "FROM experiences WHERE reward >= 1 AND right(task_id, 1) <> '0'"
    ).fetchall()
    [(drawn,)] = lake.sql("SELECT count(*) FROM draws_current").fetchall()
    assert drawn == right
    assert told["rows_trained"] == short
    assert told["held_out_loss_after"] < by_frequency(lake) - 1.0


def by_frequency(lake: Store) -> float:
    """Return the held-out loss of knowing nothing but how frequent each character is."""

    def characters(where: str) -> Counter[str]:
        found = lake.sql(f"SELECT response_text FROM experiences WHERE {where}").fetchall()
        return Counter("".join(text + "\0" for (text,) in found))  # and the end token

    seen = characters("reward >= 1 AND right(task_id, 1) <> '0'")
    asked = characters(HELD_OUT)
    loss = -sum(n * math.log((seen[c] + 1) / (seen.total() + 108)) for c, n in asked.items())
    return loss / asked.total()
