"""Pull the plug of a run in stages at random moments: it ends as the one that was never killed."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.jobs import opened, start

import rlake
from rlake.loop.config import load_stages
from rlake.loop.stages import run_stages
from rlake.store import Store

CONFIG = """
name: small
seed: 3
threads: 1
model:
  from_scratch: {hidden_size: 16, layers: 1, heads: 2, max_length: 16, init_std: 0.3,
    alphabet: "01234+="}
tasks:
  generator: {rlake.loop.recipes.toys:addition: {low: 0, high: 4, held_out: 5}}
data: {generator: rlake.loop.recipes.toys:expert_answers}
trainer: {batch_size: 4, learning_rate: 5.0e-3, checkpoint_every: 4}
evaluate: {sampling: {max_tokens: 3, temperature: 0}}
stages:
  warm_start:
    algorithm: sft
    trainer: {where: source = 'expert', steps: 10, max_uses: 9}
  learn:
    algorithm: {grpo: {group_size: 4}}
    explorer: {rewards: "support.jobs:even_digits", sampling: {max_tokens: 3}}
    trainer: {steps: 10}
  measure: {evaluate: {}}
"""
MOMENTS = 10
FACTS = (
    "SELECT run_id, step, position, experience_id, weight, lag, advantage, digest "
    "FROM draws_current ORDER BY run_id, step, position",
    "SELECT run_id, step, value FROM metrics_current WHERE name = 'train/loss' ORDER BY 1, 2",
    "SELECT run_id, policy_version, parent_version, parent_run_id, digest FROM policies_current "
    "ORDER BY run_id, policy_version",
    "SELECT split_part(run_id, ':', 1), batch, task_id, response_text, reward FROM experiences "
    "JOIN (SELECT max(run_id) AS run_id FROM experiences WHERE purpose = 'eval') "
    "USING (run_id) ORDER BY task_id",
)
"""What the two runs must agree on: rows drawn, losses, weights, and the last evaluation."""
BROKEN = """
    SELECT 'row drawn twice', run_id || experience_id FROM draws_current
    GROUP BY run_id, experience_id, epoch HAVING count(*) > 1
    UNION ALL
    SELECT 'step with places missing', run_id || '/' || step FROM draws_current
    GROUP BY run_id, step HAVING count(*) <> max(position) + 1
    UNION ALL
    SELECT 'row stored twice', experience_id FROM experiences
    GROUP BY experience_id HAVING count(*) > 1
    UNION ALL
    SELECT 'steps missing', run_id FROM draws_current
    GROUP BY run_id HAVING count(DISTINCT step) <> 10 OR max(step) <> 10
    UNION ALL
    SELECT 'stage begun from other weights', l.digest FROM policies_current l
    JOIN policies_current w ON w.run_id = l.parent_run_id AND w.policy_version = l.parent_version
    WHERE l.digest <> w.digest
"""
"""What must not be there after any kill."""


def written(folder: Path) -> Path:
    """Write the configuration, and return where."""
    (folder / "staged.yaml").write_text(CONFIG)
    return folder / "staged.yaml"


def staged(folder: Path, *args: str) -> "subprocess.Popen[str]":
    written(folder)
    return start(folder, "run", "staged.yaml", "--store", "lake", *args)


def progress(lake: Store) -> tuple[int, int]:
    """Return how many steps were drawn, evaluations counted in, and how many jobs were begun."""
    [(steps,)] = lake.sql("SELECT count(DISTINCT (run_id, step)) FROM draws").fetchall()
    [(evaluations, jobs)] = lake.sql(
        "SELECT count(*) FILTER (job = 'evaluate'), count(DISTINCT (run_id, job, attempt)) "
        "FROM job_events"
    ).fetchall()
    return steps + evaluations, jobs


def kill_at(
    process: "subprocess.Popen[str]", place: Path, moment: int, *, later: float
) -> str | None:
    """Send SIGKILL `later` seconds after a moment; return where the run stood, None if it ended.

    The moment is so much progress, and a job that this process began.
    """
    deadline = time.monotonic() + 100
    lake: Store | None = None
    before: int | None = None
    while process.poll() is None:
        assert time.monotonic() < deadline, "the run got nowhere"
        lake = lake or opened(place)
        if lake is not None:
            done, jobs = progress(lake)
            before = jobs if before is None else before
            if done >= moment and (jobs > before or moment == 0):
                time.sleep(later)
                process.send_signal(signal.SIGKILL)
                process.communicate()
                return where(lake) if process.returncode < 0 else None
        time.sleep(0.005)
    out, err = process.communicate()
    assert process.returncode == 0, err + out
    return None


def where(lake: Store) -> str:
    rows = lake.sql(
        "SELECT run_id, job, attempt, status FROM job_events ORDER BY created_at DESC LIMIT 1"
    ).fetchall()
    steps = lake.sql("SELECT run_id, max(step) FROM draws GROUP BY 1 ORDER BY 1").fetchall()
    return f"{rows[0] if rows else 'nothing on record'}, drawn to {steps}"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_staged_run_killed_at_ten_random_moments_equals_one_that_was_never_killed(
    tmp_path: Path,
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    run_stages(rlake.connect(whole / "lake"), load_stages(written(whole)))
    chance = random.Random(20260107)
    kills = []
    for moment in sorted(chance.choices(range(22), k=MOMENTS)):
        process = staged(killed, *(["--resume"] if kills else []))
        later = chance.uniform(0, 0.2)
        stood = kill_at(process, killed / "lake", moment, later=later)
        if stood is not None:
            kills.append(stood)
            sys.stderr.write(f"kill {len(kills)}, {moment} of 21 and {later:.2f} s: {stood}\n")
    assert len(kills) >= MOMENTS - 2, "the run ended before it was killed often"
    run_stages(rlake.connect(killed / "lake"), load_stages(written(killed)), resume=True)
    lakes = [rlake.connect(folder / "lake", create=False) for folder in (whole, killed)]
    for query in FACTS:
        first, second = (lake.sql(query).fetchall() for lake in lakes)
        assert first, query
        assert second == first, query
    assert lakes[1].sql(BROKEN).fetchall() == []
