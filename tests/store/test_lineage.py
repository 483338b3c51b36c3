"""Lineage: from a policy to all that made it, and from a row to all that it made."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.builders import experiences, task
from support.table_rows import draw, event, policy

from rlake.operators import copy_best, keep, priority
from rlake.pipelines import Pipeline, Table
from rlake.store import Store, connect
from rlake.store.errors import NotFoundError
from rlake.store.ids import combine
from rlake.store.lineage.policy import of_experience, of_policy

CONFIG = {"trainer": {"side_columns": ["reward=score:strict@2"], "at": "told"}}
JUDGED = [{"name": "reward:exact_match", "value": "abc"}]


def run_row(attempt: int, start_step: int, *, run_id: str = "r", **rest: Any) -> dict[str, Any]:
    own = {"config": json.dumps(CONFIG), "code_version": f"0.{attempt}"}
    return event(run_id=run_id, attempt=attempt, start_step=start_step, **own) | rest


def draw_row(
    attempt: int, step: int, position: int, experience_id: str, **rest: Any
) -> dict[str, Any]:
    own = {"attempt": attempt, "position": position, "lag": step - 1}
    return draw(experience_id, step, batch_digest=f"b{attempt}.{step}", **own) | rest


def policy_row(attempt: int, version: int, parent: int | None, **rest: Any) -> dict[str, Any]:
    return policy(attempt, version, parent_version=parent) | rest


@pytest.fixture(scope="module")
def trained_once(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what `trained` copies."""
    folder = tmp_path_factory.mktemp("trained") / "store"
    shutil.copytree(empty_store, folder)
    _train(connect(folder))
    return folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Store:
    """The store that `_train` makes."""
    shutil.copytree(trained_once, tmp_path / "trained")
    return connect(tmp_path / "trained")


def _train(store: Store) -> None:
    """Store a run over 8 tries and a copy: attempt 1 took steps 1-4, attempt 2 steps 3-4 again.

    Step s draws two rows: tries 2s-2 and 2s-1; attempt 2's step 4 draws the copy in place of the
    second. Weights were published at 0, 2 and 4.
    """
    store.append("tasks", [task(0), task(1)])
    tries = [
        replace(e, run_id="r", batch=1, policy_version=i // 4)
        for i, e in enumerate(experiences(8, reward=[1.0, 0.0, None, 0.0]))
    ]
    store.append("experiences", tries)
    store.append("experiences", experiences(1, experience_id="file/00", source="imported"))
    source = Table("experiences", where="run_id = 'r'")
    best = copy_best(min_reward=1.0)
    Pipeline(name="copies", source=source, operators=[best], sink=Table("experiences")).run(store)
    Pipeline(name="weak", source=source, operators=[keep(where="reward > 0")]).run(store)
    ranked = [priority(expression="reward + 1")]
    Pipeline(name="ranks", source=source, operators=ranked, sink=Table("experience_values")).run(
        store
    )
    verdict = {"scorer": "strict", "scorer_version": "2", "value": 0.5}
    store.append("scores", [verdict | {"experience_id": e.experience_id} for e in tries[:3]])
    store.snapshot("told")
    store.snapshot("r.tasks")
    store.snapshot("other.tasks")
    store.append("job_events", [run_row(1, 1), run_row(1, 1, job="explore", functions=JUDGED)])
    [copy] = store.sql(
        "SELECT experience_id FROM experiences WHERE parent_id = 'g001/00'"
    ).fetchall()[0]
    ids = [str(e.experience_id) for e in tries]
    for attempt, start, stop in ((1, 1, 5), (2, 3, 5)):
        if attempt == 2:
            store.append(
                "job_events", [run_row(2, 3), run_row(2, 1, job="explore", functions=JUDGED)]
            )
        for step in range(start, stop):
            pair = [ids[2 * step - 2], copy if attempt == 2 and step == 4 else ids[2 * step - 1]]
            store.append("draws", [draw_row(attempt, step, i, e) for i, e in enumerate(pair)])
        if attempt == 1:
            store.append("policies", [policy_row(1, 0, None), policy_row(1, 2, 0)])
        store.append("policies", [policy_row(attempt, 4, 2)])


def test_a_policy_names_its_parents_steps_and_rows(trained: Store) -> None:
    made = of_policy(trained, "r", 4)
    assert made.weights["digest"] == "w2.4", "attempt 1's version 4 was superseded"
    assert made.parents == [2, 0]
    assert [(a["attempt"], a["first_step"], a["last_step"]) for a in made.attempts] == [
        (1, 1, 2),
        (2, 3, 4),
    ]
    assert made.rows["num_rows"] == made.rows["num_experiences"] == 8
    assert (made.rows["reward_mean"], made.rows["num_unscored"]) == (3 / 6, 2)
    assert (made.rows["lag_mean"], made.rows["lag_max"]) == (1.5, 3)
    assert [b["batch_digest"] for b in made.batches] == ["b1.1", "b1.2", "b2.3", "b2.4"]
    assert made.batches_digest == combine(["b1.1", "b1.2", "b2.3", "b2.4"])
    assert made.code_versions == ["0.1", "0.2"]
    assert made.config == CONFIG


def test_the_rows_of_a_policy_can_be_had_in_the_order_of_training(trained: Store) -> None:
    rows = trained.sql(of_policy(trained, "r", 4).sql).pl()
    assert rows["step"].to_list() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert rows["experience_id"].to_list()[:7] == [
        "g000/00", "g000/01", "g000/02", "g000/03", "g001/00", "g001/01", "g001/02",
    ]  # fmt: skip
    assert rows["experience_id"][7].startswith("g001/00/copy_best-")


def test_an_earlier_policy_was_made_by_fewer_rows(trained: Store) -> None:
    assert of_policy(trained, "r", 2).rows["num_rows"] == 4
    start = of_policy(trained, "r", 0)
    assert (start.rows["num_rows"], start.batches, start.parents) == (0, [], [])
    assert start.batches_digest is None


def test_a_policy_names_where_its_rows_came_from_and_who_wrote_them(trained: Store) -> None:
    found = [
        (s["source"], s["run_id"], s["num_rows"], s["policy_version_min"], s["policy_version_max"])
        for s in of_policy(trained, "r", 4).sources
    ]
    assert found == [("explorer", "r", 7, 0, 1), ("synthetic", None, 1, 1, 1)]


def test_a_policy_names_the_pipelines_that_made_ranked_and_left_out_its_rows(
    trained: Store,
) -> None:
    found = {p["did"]: p for p in of_policy(trained, "r", 4).pipelines}
    counts = {did: (p["pipeline"], p["num_experiences"]) for did, p in found.items()}
    assert counts == {
        "made": ("copies", 1),
        "derived priority": ("ranks", 5),
        "left out": ("weak", 5),
    }
    assert found["made"]["operators"][0].startswith("copy_best(min_reward=1.0) ")


def test_a_policy_names_its_rewards_side_columns_and_snapshots(trained: Store) -> None:
    made = of_policy(trained, "r", 4)
    assert made.functions == [
        {"name": "reward:exact_match", "digest": "abc", "run_id": "r", "attempts": [1, 2]}
    ]
    assert made.side_columns == [
        {
            "spec": "reward=score:strict@2",
            "table": "scores",
            "versions": [{"version": "2", "num_experiences": 3}],
        }
    ]
    assert [s["name"] for s in made.snapshots] == ["told", "r.tasks"]


def test_rows_that_are_no_longer_stored_are_counted(trained: Store) -> None:
    trained.append("draws", [draw_row(2, 5, 0, "gone/00")])
    trained.append("policies", [policy_row(2, 5, 4)])
    made = of_policy(trained, "r", 5)
    assert (made.rows["num_rows"], made.rows["num_gone"]) == (9, 1)
    assert {"source": None, "num_rows": 1}.items() <= made.sources[-1].items()


def test_tokenizers_of_rows_that_were_text_are_named(trained: Store) -> None:
    trained.append("draws", [draw_row(2, 5, 0, "file/00", tokenizer="t1")])
    trained.append("policies", [policy_row(2, 5, 4)])
    assert of_policy(trained, "r", 5).tokenizers == ["t1"]


def test_the_only_run_need_not_be_named(trained: Store) -> None:
    assert of_policy(trained, None, 4).run_id == "r"
    trained.append("policies", [policy_row(1, 0, None, run_id="s")])
    with pytest.raises(NotFoundError, match="2 runs have published weights; say which run's"):
        of_policy(trained, None, 4)


@pytest.mark.parametrize(
    ("run", "version", "told"),
    [
        ("r", 3, r"no weights of version 3 that count; the nearest are `2`, `4`, `0`"),
        ("rr", 4, "no run `rr` has published weights; did you mean `r`"),
    ],
)
def test_an_unknown_policy_is_an_error_with_the_nearest(
    trained: Store, run: str, version: int, told: str
) -> None:
    with pytest.raises(NotFoundError, match=told):
        of_policy(trained, run, version)


def test_weights_of_a_superseded_attempt_do_not_count(store: Store) -> None:
    store.append("job_events", [run_row(1, 1)])
    store.append("policies", [policy_row(1, 0, None), policy_row(1, 4, 0)])
    store.append("job_events", [run_row(2, 3)])
    with pytest.raises(NotFoundError, match="no weights of version 4 that count"):
        of_policy(store, "r", 4)


def test_a_store_without_weights_says_so(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no runs have published weights"):
        of_policy(store, None, 1)


def test_an_experience_names_its_draws_and_the_policies_that_it_went_into(trained: Store) -> None:
    early = of_experience(trained, "g000/00")
    assert [(d["attempt"], d["step"], d["counts"]) for d in early.draws] == [(1, 1, True)]
    assert early.policies == [
        {"run_id": "r", "first_step": 1, "first_version": 2, "last_version": 4, "num_versions": 2}
    ]
    versions = trained.sql(early.sql).pl()["policy_version"].to_list()
    assert versions == [2, 4], "version 2 is the first one published that has it"
    again = of_experience(trained, "g001/00")
    assert [(d["attempt"], d["step"], d["counts"]) for d in again.draws] == [
        (1, 3, False),
        (2, 3, True),
    ]


def test_what_only_a_superseded_attempt_drew_influenced_nothing(trained: Store) -> None:
    row = of_experience(trained, "g001/03")
    assert [(d["attempt"], d["counts"]) for d in row.draws] == [(1, False)]
    assert row.policies == []


def test_an_experience_that_no_weights_were_published_after_says_so(trained: Store) -> None:
    trained.append("draws", [draw_row(2, 5, 0, "file/00")])
    [row] = of_experience(trained, "file/00").policies
    assert (row["first_step"], row["first_version"], row["num_versions"]) == (5, None, 0)


def test_an_experience_names_what_it_was_made_from_and_by(trained: Store) -> None:
    [child] = of_experience(trained, "g001/00").children
    copy = of_experience(trained, child["experience_id"])
    assert [p["experience_id"] for p in copy.parents] == ["g001/00"]
    assert copy.pipeline is not None
    assert copy.pipeline["pipeline"] == "copies"
    assert copy.policies[0]["first_version"] == 4
    assert of_experience(trained, "g001/00").pipeline is None
    assert of_experience(trained, "file/00").draws == []


def test_an_experience_names_what_was_said_of_it(trained: Store) -> None:
    row = of_experience(trained, "g000/01")
    assert row.task is not None
    assert row.task["answer"] == "0"
    assert [(s["scorer"], s["value"]) for s in row.scores] == [("strict", 0.5)]
    assert [(d["name"], d["value"]) for d in row.derived] == [("priority", 1.0)]
    assert [(d["pipeline"], d["operator"]) for d in row.drops] == [("weak", "keep")]


def test_an_unknown_experience_is_an_error_with_the_nearest(trained: Store) -> None:
    with pytest.raises(NotFoundError, match="no experience `g000/9`; did you mean `g000/0"):
        of_experience(trained, "g000/9")


def test_who_made_a_row_is_known_after_maintenance_too(trained: Store) -> None:
    trained.maintain()
    trained.append("experiences", experiences(1, experience_id="late/00", group_id="late"))
    assert {"made": 1}.items() <= {
        p["did"]: p["num_experiences"] for p in of_policy(trained, "r", 4).pipelines
    }.items()
    assert of_experience(trained, "late/00").pipeline is None


def test_lineage_of_the_past_is_what_it_was(trained: Store) -> None:
    trained.snapshot("then")
    trained.append("draws", [draw_row(2, 5, 0, "file/00")])
    trained.append("policies", [policy_row(2, 5, 4)])
    assert of_policy(trained.at("then"), "r", 4).rows["num_rows"] == 8
    with pytest.raises(NotFoundError):
        of_policy(trained.at("then"), "r", 5)


def test_the_maker_of_rows_of_any_part_of_a_run_is_known(store: Store) -> None:
    first, last = ([e.row() | {"lineage_id": "l"}] for e in experiences(2))
    store.append("experiences", first)
    made = store.append("experiences", last).version
    store.append("lineage", [{
        "lineage_id": "l", "pipeline": "copies", "source": "s", "sink": "experiences",
        "operators": [], "source_versions": [],
        "sink_versions": [{"name": "experiences", "version": made}],
        "rows_in": 2, "rows_out": 2, "rows_dropped": 0,
    }])  # fmt: skip
    makers = [of_experience(store, f"g000/{i:02d}").pipeline for i in range(2)]
    assert [maker and maker["pipeline"] for maker in makers] == ["copies", "copies"]
