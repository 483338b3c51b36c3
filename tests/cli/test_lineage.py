"""`rlake lineage`: what a person reads, what a script reads, and what is wrong."""

import json
import re
from dataclasses import replace

import pytest
from support.builders import experiences, task
from support.commands import Command, refused

from rlake.store import Store
from rlake.store.maintenance import retention


@pytest.fixture
def trained(lake: Store) -> Store:
    """A run of two steps over four tries, the second of which an attempt did again."""
    of_run = {"run_id": "demo", "code_version": "1.2", "name": "demo", "status": "running"}
    config = json.dumps({"algorithm": "grpo", "seed": 7})
    functions = [{"name": "reward:exact_match", "value": "abc"}]
    lake.append("tasks", [task(0)])
    tries = [
        replace(e, run_id="demo", batch=1, policy_version=0, segments=None)
        for e in experiences(4, reward=[1.0, 0.0, None, 0.5])
    ]
    lake.append("experiences", tries)
    lake.snapshot("demo.tasks")
    jobs = [("explore", 1, 1), ("train", 1, 1), ("train", 2, 2)]
    rows = [
        of_run | {"config": config, "job": j, "attempt": a, "start_step": s, "functions": functions}
        for j, a, s in jobs
    ]
    lake.append("job_events", rows)
    draws = [
        {
            "run_id": "demo", "attempt": attempt, "step": step, "position": i, "epoch": 1,
            "lag": step - 1, "experience_id": tries[2 * step - 2 + i].experience_id,
            "weight": 1.0, "sampler": "fifo", "digest": "d", "batch_digest": f"b{step}",
        }
        for attempt, step in ((1, 1), (1, 2), (2, 2))
        for i in range(2)
    ]  # fmt: skip
    lake.append("draws", draws)
    weights = [
        {
            "run_id": "demo", "attempt": a, "policy_version": v, "step": v, "path": f"v{v}",
            "parent_version": v - 1 if v else None, "digest": f"weights{a}{v}",
        }
        for a, v in ((1, 0), (1, 1), (2, 2))
    ]  # fmt: skip
    lake.append("policies", weights)
    lake.append(
        "scores",
        [{"experience_id": "g000/02", "scorer": "strict", "scorer_version": "2", "detail": "why"}],
    )
    return lake


def plain(text: str) -> str:
    """Take times out, which differ from run to run."""
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)


def test_a_policys_lineage_reads_from_the_weights_down_to_the_rows(
    rlake: Command, trained: Store
) -> None:
    done = rlake("lineage", "--policy", "2")
    assert done.returncode == 0, done.stderr
    tree, _, query = plain(done.stdout).partition("\n\n")
    assert tree.splitlines() == [
        "policy demo:2  attempt 2, TIME, digest weights22",
        "├── trained from  1 <- 0",
        "├── steps",
        "│   ├── 1 by attempt 1: 2 draws",
        "│   ├── 2 by attempt 2: 2 draws",
        "│   └── digest of all batches in order: " + json_digest(rlake),
        "├── rows",
        "│   ├── 4 draws of 4 experiences in 1 group",
        "│   ├── reward 0.5 on average, 0 to 1, NULL in 1",
        "│   └── lag 0.5 on average, at most 1",
        "├── written by  explorer of run demo, policy 0: 4 experiences",
        "├── functions  reward:exact_match abc, attempt 1",
        "├── snapshots  demo.tasks, TIME, experiences at 2",
        "└── code",
        "    ├── rlake 1.2",
        "    ├── algorithm: grpo",
        "    └── seed: 7",
    ]
    rows = trained.sql(query.strip().removeprefix('rlake sql "').removesuffix('"')).fetchall()
    assert len(rows) == 4, "the query that is printed gives all rows"


def json_digest(rlake: Command) -> str:
    found = json.loads(rlake("lineage", "--policy", "demo:2", "--json").stdout)
    return str(found["batches_digest"])


def test_an_experiences_lineage_reads_from_its_task_to_the_policies(
    rlake: Command, trained: Store
) -> None:
    done = rlake("lineage", "--experience", "g000/02")
    tree, _, query = plain(done.stdout).partition("\n\n")
    assert tree.splitlines() == [
        "experience g000/02  reward NULL",
        "├── comes from",
        "│   ├── explorer of run demo, batch 1, group g000, TIME",
        "│   └── written by policy 0",
        f"├── task  {task(0).task_id}: 0+0= -> 0",
        "├── drawn",
        "│   ├── run demo step 2 place 0, weight 1, lag 1, fifo; superseded: attempt 1 was done "
        "again",
        "│   └── run demo step 2 place 0, weight 1, lag 1, fifo",
        "├── went into  demo:2",
        "└── scores  strict@2 NULL (why)",
    ]
    assert query.startswith('rlake sql "SELECT')
    early = plain(rlake("lineage", "--experience", "g000/00").stdout)
    assert "went into  demo:1, and 1 version after it, to 2" in early


def test_lineage_as_json_is_one_object_with_all_of_it(rlake: Command, trained: Store) -> None:
    policy = json.loads(rlake("lineage", "--policy", "2", "--run", "demo", "--json").stdout)
    assert [b["batch_digest"] for b in policy["batches"]] == ["b1", "b2"]
    assert policy["config"] == {"algorithm": "grpo", "seed": 7}
    row = json.loads(rlake("lineage", "--experience", "g000/00", "--json").stdout)
    assert row["policies"][0]["num_versions"] == 2


def test_lineage_of_the_past(rlake: Command, trained: Store) -> None:
    done = rlake("lineage", "--experience", "g000/00", "--at", "demo.tasks")
    assert "drawn  never" in done.stdout
    assert "went into  no policy" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "give either --policy or --experience"),
        (("--policy", "1", "--experience", "g000/00"), "give either --policy or --experience"),
        (("--policy", "newest"), "`newest` is not a policy version; write `40` or `RUN:40`"),
        (("--policy", "demo:1", "--run", "other"), "names run `demo`, but --run names `other`"),
        (("--policy", "9"), "no weights of version 9 that count; the nearest are `2`, `1`, `0`"),
        (("--policy", "dmo:1"), "no run `dmo` has published weights; did you mean `demo`"),
        (("--experience", "g000/2"), "no experience `g000/2`; did you mean `g000/0"),
        (("--experience", "g000/00", "--at", "demo.task"), "did you mean `demo.tasks`"),
    ],
)
def test_lineage_used_wrongly_says_how(
    rlake: Command, trained: Store, words: tuple[str, ...], told: str
) -> None:
    refused(rlake("lineage", *words), told)


def test_an_experience_that_a_retention_rule_deleted_is_still_told_of(
    rlake: Command, trained: Store
) -> None:
    gone = "gone/00"
    made = replace(experiences(1)[0], experience_id=gone, group_id="gone", run_id=None)
    trained.append("experiences", [made])
    trained.snapshot("before")
    retention.add(trained, "one", table="experiences", where=f"experience_id = '{gone}'")
    assert sum(f.rows for f in trained.maintain().forgotten) == 1
    for command in (["lineage", "--experience"], ["show"]):
        refused(
            rlake(*command, gone),
            f"experience `{gone}` was deleted",
            "by retention rule one: experiences where",
        )
        assert rlake(*command, gone, "--at", "before").returncode == 0
