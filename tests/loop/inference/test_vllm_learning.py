"""The quickstart's task, explored by vLLM while the trainer changes its weights."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.audit import audit

from rlake.loop.config import load
from rlake.loop.recipes.toys.sums import forgetful_answers
from rlake.loop.run import run
from rlake.loop.runs.job import run_folder
from rlake.loop.selftest.quickstart import MAPPING, rewards_by_step
from rlake.loop.tasks.prepare import prepare_tasks, select
from rlake.loop.weight_sync import newest
from rlake.store import Store
from rlake.store.files import import_rows, open_input

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm; `make .venv/.vllm`"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

STEPS = 40
"""Half of what the recipe takes: enough to see the rise."""
SERVED = """
    SELECT engine, count(DISTINCT weights), count(DISTINCT policy_version), count(*)
    FROM (SELECT *, unnest(digests) AS weights FROM experiences WHERE run_id = 'quickstart_grpo')
    GROUP BY engine
"""


def warm_start(store: Store, folder: Path) -> Path:
    """Imitate the quickstart's expert; on CPUs vLLM wants attention heads of 32 dimensions."""
    sft = load("quickstart_sft", ["model.from_scratch.heads=3"])
    prepare_tasks(store, sft.tasks)
    path = folder / "expert.jsonl"
    answers = forgetful_answers(select(store, "split = 'train'"), seed=0)
    path.write_text("\n".join(json.dumps(line) for line in answers))
    with open_input(path) as source:
        import_rows(store, "experiences", source, sql=MAPPING)
    run(store, sft)
    return newest(store, run_folder(store, sft), sft.name).folder


def test_the_quickstarts_task_is_learned_with_vllm_exploring(tmp_path: Path, store: Store):
    start = warm_start(store, tmp_path)
    grpo = load(
        "quickstart_grpo",
        [f"model.path={start}", "explorer.engine={vllm: {}}", f"trainer.steps={STEPS}"],
    )
    run(store, grpo)

    rewards = [reward for _, reward in rewards_by_step(store, grpo.name)]
    assert len(rewards) == STEPS
    first, last = sum(rewards[:5]) / 5, sum(rewards[-10:]) / 10
    print(f"reward of the first 5 steps {first:.3f}, of the last 10 {last:.3f}")  # noqa: T201
    assert last - first >= 0.25

    # one set of weights a step, each served as it was published
    [(engine, digests, versions, rows)] = store.sql(SERVED).fetchall()
    assert (engine, digests, versions) == ("vllm", STEPS, STEPS)
    assert rows >= STEPS * 32
    assert audit(store, [])["untrue"] == []
