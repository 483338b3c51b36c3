"""The audit of versions: which tokens are said to be of weights that are not what was published."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.audit import CLEAN, audit
from support.jobs import told
from support.tiny_models import config, table, written

import rlake
from rlake.loop.run import run
from rlake.store import Experience, Store


def policy(version: int, digest: str) -> dict[str, Any]:
    return {
        "run_id": "demo",
        "attempt": 1,
        "policy_version": version,
        "step": version,
        "path": f"policies/v{version:06d}",
        "digest": digest,
    }


@pytest.fixture
def row(store: Store) -> Experience:
    """A row whose answer two versions wrote, both of them published."""
    store.append("policies", [policy(3, "three"), policy(4, "four")])
    segments = [{"policy_version": 3, "num_tokens": 1}, {"policy_version": 4, "num_tokens": 2}]
    [made] = written(1, segments=segments, digests=["three", "four"], policy_version=3)
    return replace(made, run_id="demo", source="explorer")


def test_rows_that_say_what_was_published_pass(store: Store, row: Experience):
    imported = replace(row, experience_id="other", source="imported", digests=None)
    store.append("experiences", [row, imported])
    assert audit(store, []) == CLEAN


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ({"digests": ["three", "three"]}, "weights"),
        ({"digests": ["three", None]}, "weights"),
        ({"digests": None}, "weights"),
        ({"run_id": "demo", "segments": [{"policy_version": 3, "num_tokens": 3}] * 2}, "tokens"),
        ({"policy_version": 4}, "version"),
    ],
    ids=["another's digest", "one digest is missing", "all are", "tokens that are not", "first"],
)
def test_a_planted_lie_about_weights_is_found(
    store: Store, row: Experience, fault: dict[str, Any], what: str
):
    store.append("experiences", [replace(row, **fault)])
    found = audit(store, [])["untrue"]
    assert (what, row.experience_id) in found


def test_a_run_is_the_same_however_its_weights_move(store: Store, tmp_path: Path):
    run(store, config())
    for weights in ("memory", "broadcast"):
        other = rlake.connect(tmp_path / weights)
        run(other, config(schedule={"weight_transport": weights}))
        assert told(other) == told(store)
        assert set(table(other, "policies")["transport"]) == {weights}
        assert audit(other, []) == CLEAN
