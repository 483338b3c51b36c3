"""Costly operators answer from memory, as they would have answered; a memory may go at any time."""

import linecache
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import polars as pl
import pyarrow as pa
import pytest
from support.builders import experiences, line_of, task

import rlake
from rlake.operators import Batches, Explained, Operator, Rows, group_zscore, keep, operator, score
from rlake.operators.decorator import OperatorFunction
from rlake.operators.reward_protocol import Verdict, of_group
from rlake.pipelines import File, Pipeline, Sql, Table, cache
from rlake.pipelines.cache import OperatorCache
from rlake.pipelines.cache_tables import DIGEST, TIDY_EVERY, CacheTables
from rlake.store import Experience, Store, Task
from rlake.store.errors import OperatorError

ASKED: list[str] = []
"""The texts that the costly functions below were asked about."""

TEXTS = pl.DataFrame(
    {
        "experience_id": list("abcdef"),
        "response_text": ["one", "two words", "three of words", "two words", None, "bad"],
        "reward": [1.0, 0.0, 1.0, 0.0, None, 1.0],
    }
)


@operator("derive", reads=("response_text",))
def words(*, least: int = 0) -> Batches:
    def count(batch: pa.RecordBatch) -> pa.RecordBatch:
        texts = [t or "" for t in batch.column("response_text").to_pylist()]
        ASKED.extend(texts)
        return pa.record_batch({"words": [max(least, len(t.split())) for t in texts]})

    return Batches(count, {"words": pl.Int64})


@operator("filter", reads=("response_text",), writes=("size",))
def brief(*, limit: int = 10) -> Explained:
    def judge(row: dict[str, Any]) -> dict[str, Any]:
        size = len(_asked(row))
        return {"keep": size < limit, "reason": f"{size} characters", "size": size}

    kinds = {"keep": pl.Boolean, "reason": pl.String, "size": pl.Int64}
    return Explained(Rows(judge, kinds), reason="too long")


def _asked(row: dict[str, Any]) -> str:
    ASKED.append(row["response_text"])
    if row["response_text"] == "bad":
        raise ValueError("a bad text")
    return row["response_text"] or ""


@operator("clean", reads=("response_text",))
def loud() -> Rows:
    def shout(row: dict[str, Any]) -> dict[str, Any]:
        return {"response_text": _asked(row).upper()}

    return Rows(shout, {"response_text": pl.String})


@operator("prioritize", reads=("response_text",))
def by_length() -> Rows:
    def length(row: dict[str, Any]) -> dict[str, Any]:
        ASKED.append(row["response_text"])
        return {"priority": float(len(row["response_text"] or ""))}

    return Rows(length, {"priority": pl.Float64})


COSTLY = [words(), words(least=2), brief(), loud(), by_length()]


@pytest.fixture(autouse=True)
def _nothing_asked() -> None:
    ASKED.clear()


@pytest.mark.parametrize("op", COSTLY, ids=str)
def test_what_is_remembered_is_what_the_operator_itself_makes(store: Store, op: Operator) -> None:
    memory, expected = OperatorCache(store), op.apply(TEXTS)
    for part in (TEXTS[:3], TEXTS, TEXTS.reverse(), TEXTS[:0]):
        made, _ = memory.apply(op, part)
        plain = op.apply(part)
        for name in ("rows", "dropped", "failed"):
            assert getattr(made, name).equals(getattr(plain, name)), name
            assert getattr(made, name).schema == getattr(plain, name).schema
    ASKED.clear()
    made, cache = memory.apply(op, TEXTS)
    assert made.rows.equals(expected.rows)
    num_failed = expected.failed.height
    assert [text for text in ASKED if text != "bad"] == []
    assert len(ASKED) == num_failed  # an error is not remembered
    assert cache == TEXTS.height - expected.failed.height


def test_equal_texts_are_asked_about_once_also_from_other_rows_and_other_handles(
    store: Store,
) -> None:
    OperatorCache(store).apply(words(), TEXTS)
    assert sorted(ASKED) == ["", "bad", "one", "three of words", "two words"]
    others = TEXTS.with_columns(pl.col("experience_id") + "/2", reward=pl.lit(9.0))
    ASKED.clear()
    made, cache = OperatorCache(rlake.connect(store.uri)).apply(words(), others)
    assert (ASKED, cache) == ([], 6)
    assert made.rows["reward"].to_list() == [9.0] * 6


def test_only_what_a_changed_parameter_touches_is_worked_out_again(store: Store) -> None:
    texts = ["one", "two words", "three of words", "four words in all"] * 2
    rows = experiences(8, reward=0.0)
    with_texts = pl.DataFrame([r.row() for r in rows]).with_columns(response_text=pl.Series(texts))
    store.append("experiences", with_texts.drop("rewards", "metrics"))

    def run(least: int, above: int, *, limit: int = 10) -> list[tuple[int, int]]:
        ASKED.clear()
        chain = [words(least=least), keep(where=f"words > {above}"), brief(limit=limit)]
        report = Pipeline("p", Table("experiences"), chain, Table("experience_values")).run(store)
        return [(step.rows_in, step.cached) for step in report.steps]

    assert run(0, 1) == [(8, 0), (8, 0), (6, 0)]
    assert run(0, 2) == [(8, 8), (8, 0), (4, 4)]  # another threshold
    assert ASKED == []
    assert run(1, 2) == [(8, 0), (8, 0), (4, 4)]  # the costly step itself; the next sees the same
    assert len(ASKED) == 4
    assert run(1, 2, limit=11) == [(8, 8), (8, 0), (4, 0)]
    costs = store.scan("lineage").sort("created_at").collect()["costs"].to_list()
    assert [[c["cached"] for c in run] for run in costs] == [
        [0, 0, 0],
        [8, 0, 4],
        [0, 0, 4],
        [8, 0, 0],
    ]


def _as_written(source: str, folder: Path) -> OperatorFunction[...]:
    """Return the operator `score` of a module with this source, always of the same name."""
    file = folder / "costly_here.py"
    file.write_text(source)
    names: dict[str, Any] = {"__name__": "costly_here"}
    exec(compile(source, str(file), "exec"), names)
    linecache.checkcache(str(file))
    return names["score"]


SOURCE = """
import polars as pl
from rlake.operators import Rows, operator

@operator("derive", reads=("response_text",))
def score() -> Rows:
    def count(row):
        return {"score": len(row["response_text"] or "") + 0}
    return Rows(count, {"score": pl.Int64})
"""


def test_a_changed_function_is_not_answered_for_by_what_it_said_before(
    store: Store, tmp_path: Path
) -> None:
    memory = OperatorCache(store)
    before = _as_written(SOURCE, tmp_path)()
    same = _as_written(SOURCE, tmp_path)()
    assert before.fingerprint == same.fingerprint
    assert memory.apply(before, TEXTS)[0].rows["score"][0] == 3
    after = _as_written(SOURCE.replace("+ 0", "+ 1"), tmp_path)()
    assert after.fingerprint != before.fingerprint
    made, cache = memory.apply(after, TEXTS)
    assert (made.rows["score"][0], cache) == (4, 0)


def test_a_memory_may_be_deleted_or_damaged_at_any_time(store: Store) -> None:
    memory = OperatorCache(store)
    expected = memory.apply(words(), TEXTS)[0].rows
    folder = Path(store.root) / "memory"
    for harm in (shutil.rmtree, _damage):
        harm(folder)
        made, cache = memory.apply(words(), TEXTS)
        assert (made.rows.equals(expected), cache) == (True, 0)
        memory.tables.clear()
        memory.apply(words(), TEXTS)


def _damage(folder: Path) -> None:
    for file in folder.glob("*.lance/data/*"):
        file.write_bytes(b"no longer what it was")


def test_memories_stay_within_their_bytes_and_the_oldest_goes_first(store: Store) -> None:
    rows = pl.DataFrame({"experience_id": [f"{i}" for i in range(500)]}).with_columns(
        response_text="experience_id"
    )
    OperatorCache(store).apply(words(), rows)
    [one] = OperatorCache(store).tables.listed()
    assert one.operator == "words(least=0)"
    small = OperatorCache(store, limit_bytes=60_000)
    for least in (1, 2, 3):
        small.apply(words(least=least), rows)
    kept = small.tables.listed()
    assert [m.operator for m in kept][-1] == "words(least=3)"
    assert "words(least=0)" not in [m.operator for m in kept]
    assert sum(m.num_bytes for m in kept) <= 60_000
    none = OperatorCache(store, limit_bytes=10)
    assert none.apply(words(least=4), rows)[0].rows.height == 500
    assert none.tables.listed() == []


def test_many_small_additions_become_few_files_and_all_are_found(store: Store) -> None:
    memories, reader = CacheTables(store), CacheTables(store)
    kinds = pl.Schema({DIGEST: pl.String, "words": pl.Int64})
    for i in range(TIDY_EVERY + 1):
        memories.add("k", "words()", pl.DataFrame([[f"{i}"], [i]], schema=kinds))
        assert reader.find("k", pl.Series([f"{i}"]), kinds).rows() == [(f"{i}", i)]
    files = list(Path(store.root).glob("memory/k.lance/data/*"))
    dataset = lance.dataset(f"{store.root}/memory/k.lance")
    assert len(dataset.get_fragments()) < 4 <= len(files)  # old files stay for readers
    every = pl.Series([f"{i}" for i in range(TIDY_EVERY + 1)])
    assert sorted(reader.find("k", every, kinds)["words"]) == list(range(TIDY_EVERY + 1))


def test_threads_share_a_memory(store: Store) -> None:
    memory, made = OperatorCache(store), {}
    parts = [TEXTS.with_columns(pl.col("response_text") + f" {i}") for i in range(4)]

    def work(i: int) -> None:
        made[i] = memory.apply(words(), parts[i])[0].rows

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(made[i].equals(words().apply(parts[i]).rows) for i in range(4))
    [kept] = memory.tables.listed()
    assert 4 * 4 + 1 <= kept.rows <= 4 * 5  # several may have asked about the text that all have


def test_a_run_that_fails_keeps_what_it_paid_for(store: Store) -> None:
    [failing] = [op for op in COSTLY if op.name == "brief"]
    rows = pl.concat([_numbered(1024), TEXTS.select("experience_id", "response_text")])
    with pytest.raises(OperatorError, match="more than the 0 allowed"):
        OperatorCache(store).apply(failing, rows, max_failed=0)
    assert OperatorCache(store).apply(failing, _numbered(1024))[1] == 1024


def _numbered(n: int) -> pl.DataFrame:
    ids = [f"n{i}" for i in range(n)]
    return pl.DataFrame({"experience_id": ids, "response_text": ids})


SCORES = Table("scores")
JUDGED: list[str] = []
"""The replies that the judge below was asked about."""
WITH_ANSWERS = Sql("SELECT e.*, t.answer FROM experiences e JOIN tasks t USING (task_id)")


async def judge(task: Task, experience: Experience) -> float:
    JUDGED.append(str(experience.response_text))
    if experience.response_text == "no idea" and experience.rollout_index > 2:
        raise ValueError("what is there to judge?")
    return float(task.answer == experience.response_text)


def judging(*before: Any, sink: Any = SCORES) -> Pipeline:
    chain = [*before, score(reward=judge), *([] if sink is SCORES else [keep(where="reward = 1")])]
    return Pipeline("judged", WITH_ANSWERS, chain, sink)


@pytest.fixture
def to_judge(store: Store) -> Store:
    JUDGED.clear()
    store.append("tasks", [task(n) for n in range(10)])
    store.append("experiences", experiences(40, reward=(1.0, 0.0, 1.0, 1.0)))
    return store


def test_a_changed_filter_before_a_judge_asks_it_about_new_rows_only(to_judge: Store) -> None:
    judging(keep(where="rollout_index < 3")).run(to_judge)
    assert len(JUDGED) == 30
    judging(keep(where="rollout_index < 2")).run(to_judge)
    assert len(JUDGED) == 30, "all of these were asked about before"
    longer = keep(where="length(response_text) > 0")
    report = judging(words(), group_zscore(), longer).run(to_judge)
    assert len(JUDGED) == 40, "columns that others add are no part of the question"
    assert report.steps[-1].cached == 30


@pytest.mark.parametrize("sink", ["scores", "experience_values", "file", "none"])
def test_errors_of_a_judge_are_failures_whatever_the_sink(
    to_judge: Store, tmp_path: Path, sink: str
) -> None:
    bad = experiences(4, reward=0.0, run_id="x", experience_id="bad/00")[3:]
    to_judge.append("experiences", bad)
    places = {"scores": SCORES, "experience_values": Table("experience_values"), "none": None}
    to = places.get(sink, File(str(tmp_path / "out.jsonl")))
    for full in (False, True):
        report = judging(sink=to).run(to_judge, full=full)
        assert report.rows_failed == 1
    failed = to_judge.sql(
        "SELECT DISTINCT operator, experience_id, error FROM operator_errors"
    ).fetchall()
    why = f"ValueError: what is there to judge? {line_of(__file__, 'what is there')}"
    assert failed == [("score", "bad/00", why)]
    assert len(JUDGED) == 42, "an error is not remembered, an answer is"
    if sink == "scores":
        kept = "SELECT value, detail FROM scores WHERE experience_id = 'bad/00'"
        assert to_judge.sql(kept).fetchall() == [(None, why)]


def test_a_judge_that_fails_on_many_rows_stops_the_job(to_judge: Store) -> None:
    def broken(task: Task, experience: Experience) -> float:
        raise ConnectionError("the judge is away")

    lost = Pipeline("judged", WITH_ANSWERS, [score(reward=broken)], SCORES)
    with pytest.raises(OperatorError, match="the judge is away"):
        lost.run(to_judge)
    assert replace(lost, max_failed=1.0).run(to_judge).rows_failed == 40


GROUPS: list[str] = []
"""The groups that the judge below was asked about."""


@of_group
async def ranking(task: Task, experiences: list[Experience]) -> list[float | Verdict]:
    GROUPS.append(str(experiences[0].group_id))
    best = sorted(str(one.response_text) for one in experiences)
    place: list[float | Verdict] = [best.index(str(x.response_text)) / 10 for x in experiences]
    if experiences[0].group_id == "g009":
        place[0] = Verdict(None, "no answer", "NoAnswerError: no answer")
    return place


def ranked(*before: Any) -> Pipeline:
    return Pipeline("ranked", WITH_ANSWERS, [*before, score(reward=ranking)], SCORES)


def test_a_judge_of_groups_is_asked_again_only_about_groups_that_changed(to_judge: Store) -> None:
    def run(*before: Any) -> tuple[list[str], int]:
        GROUPS.clear()
        report = ranked(*before).run(to_judge)
        return sorted(GROUPS), report.steps[-1].cached

    many = [f"g{n:03d}" for n in range(10)]
    assert run(keep(where="group_id < 'g008'")) == (many[:8], 0)
    assert run(keep(where="group_id < 'g004'")) == ([], 16), "whole groups were dropped"
    assert run(keep(where="group_id < 'g009'")) == (["g008"], 32)
    assert run(keep(where="experience_id <> 'g002/01' AND group_id < 'g009'")) == (["g002"], 32)
    assert run(words(), keep(where="group_id < 'g009'")) == ([], 36), "others' columns do not count"
    assert run() == (["g009"], 36)
    assert run(words(least=1)) == (["g009"], 36), "a group with an error is not remembered"
    CacheTables(to_judge).clear()
    assert run(words(least=2)) == (many, 0)
    kept = to_judge.sql("SELECT value FROM scores_current ORDER BY experience_id").fetchall()
    assert [value for (value,) in kept] == [0.0, 0.3, 0.0, 0.0] * 9 + [None, 0.3, 0.0, 0.0]
    failed = to_judge.sql("SELECT DISTINCT experience_id, error FROM operator_errors").fetchall()
    assert failed == [("g009/00", "NoAnswerError: no answer")]


@operator("derive", reads=("response_text",))
def place_in_group() -> Batches:
    def count(batch: pa.RecordBatch) -> pa.RecordBatch:
        texts = [t or "" for t in batch.column("response_text").to_pylist()]
        groups = batch.column("group_id").to_pylist()
        ASKED.extend(groups)
        among = {g: sorted(t for t, h in zip(texts, groups, strict=True) if h == g) for g in groups}
        both = zip(groups, texts, strict=True)
        return pa.record_batch({"place": [0 if g is None else among[g].index(t) for g, t in both]})

    return Batches(count, {"place": pl.Int64}, by_group=True)


def test_groups_are_known_in_any_order_and_are_never_cut(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_AT_ONCE", 4)
    rows = pl.DataFrame(
        {
            "experience_id": [f"{i:02d}" for i in range(30)],
            "group_id": [None if i % 10 == 9 else f"g{i % 7}" for i in range(30)],
            "response_text": [f"{i * 7 % 11}" for i in range(30)],
        }
    )
    memory, op = OperatorCache(store), place_in_group()
    whole = op.apply(rows).rows
    for number, part in enumerate((rows, rows.reverse(), rows.sample(30, shuffle=True, seed=3))):
        made, known = memory.apply(op, part)
        assert made.rows.sort("experience_id").equals(whole)
        assert known == (30 if number else 0)
    ASKED.clear()
    is_changed = pl.col("group_id").eq_missing("g0")
    fewer = rows.filter(pl.col("experience_id") != "00")
    assert memory.apply(op, fewer)[1] == fewer.filter(~is_changed).height
    assert set(ASKED) == {"g0"}


KILLED = """
import os, signal, sys
import rlake
from rlake.operators import score
from rlake.operators.reward_protocol import of_group
from rlake.pipelines import Pipeline, Sql, Table, cache

cache._AT_ONCE, cache._KEEP_SECONDS = 8, 0.0
asked = []

@of_group
def ranking(task, experiences):
    asked.append(experiences[0].group_id)
    if len(asked) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return [0.5] * len(experiences)

source = Sql("SELECT e.*, t.answer FROM experiences e JOIN tasks t USING (task_id)")
Pipeline("killed", source, [score(reward=ranking)], Table("scores")).run(rlake.connect(sys.argv[1]))
print(len(asked))
"""


def test_a_run_killed_midway_is_not_asked_again_about_groups_that_it_finished(
    to_judge: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    given = [str(script), to_judge.uri]
    killed = subprocess.run([sys.executable, *given, "7"], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    monkeypatch.setattr(sys, "argv", [*given, "0"])
    monkeypatch.setattr("rlake.pipelines.cache._AT_ONCE", 8)  # as the script sets them
    monkeypatch.setattr("rlake.pipelines.cache._KEEP_SECONDS", 0.0)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == "4\n"
