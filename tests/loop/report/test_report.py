"""The report is one file that shows a run truly, and that nothing stored can make act."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.histories import START, History
from support.table_rows import event

from rlake.loop.config import RunConfig
from rlake.loop.report.details import samples
from rlake.loop.report.page import Report, write_report
from rlake.loop.report.summary import summary
from rlake.store import Store, connect
from rlake.store.errors import NotFoundError

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"


def _config(name: str, **settings: object) -> str:
    tree = {"name": name, "model": {"path": "some"}, "algorithm": "grpo", **settings}
    return RunConfig.model_validate(tree).model_dump_json()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    lake = connect(tmp_path_factory.mktemp("report") / "lake")
    history = History(0, steps=10)
    history.change(lambda row: row["reward"] == 1.0, response_text=HOSTILE)
    history.change(
        lambda row: row["batch"] == 3 and row["reward"] == 0.0, drop_reason="too <b>long"
    )
    history.write(lake)
    lake.append(
        "job_events",
        [
            event("done", attempt=2, start_step=2001, config=_config("r", seed=1)),
            event(
                "failed",
                run_id="s",
                config=_config("s"),
                error="out of <i>memory",
                created_at=START,
            ),
        ],
    )
    lake.append(
        "metrics",
        [
            {
                "run_id": run,
                "attempt": 1,
                "job": "train",
                "step": step,
                "name": name,
                "value": value,
            }
            for run in "rs"
            for step in range(1, 2001)
            for name, value in (("train/loss", step / 2), ("train/entropy", float(run == "r")))
        ],
    )
    return lake


@pytest.fixture(scope="module")
def page(store: Store, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    path = tmp_path_factory.mktemp("made") / "new" / "report.html"
    return write_report(store, path, "r", "s"), path.read_text(encoding="utf-8")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_stored_texts_are_shown_and_are_neither_markup_nor_templates(
    page: tuple[Report, str],
) -> None:
    _, html = page
    seen = _Tags()
    seen.feed(html)
    assert not seen.tags & {"script", "img", "iframe", "link", "object"}
    assert not [name for name in seen.attributes if name.startswith("on")]
    assert "&lt;script&gt;alert(1)" in html
    assert "{{ 7 * 7 }}" in html
    assert "too &lt;b&gt;long" in html
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"', html.replace("xlink:href", "")) == []
    assert "default-src 'none'" in html


def test_curves_are_the_means_of_neighboring_steps(page: tuple[Report, str]) -> None:
    report, html = page
    points = report.curves["train/loss"]["r"]
    assert len(points) == 500
    assert points[0] == (2.5, 1.25)
    assert points[-1] == (1998.5, 999.25)
    assert html.count("<svg") == len(report.curves)
    assert set(report.curves["train/entropy"]) == {"r", "s"}


def test_samples_are_rows_at_quantiles_of_the_reward(
    store: Store, page: tuple[Report, str]
) -> None:
    report, _ = page
    rewards = store.sql(
        "SELECT e.reward FROM draws_current d JOIN experiences e USING (experience_id) "
        "WHERE d.step > 8 ORDER BY e.reward, experience_id"
    ).fetchall()
    n = len(rewards) - 1
    expected = [rewards[int(q * n)][0] for q in (0, 0.25, 0.5, 0.75, 1)]
    assert [row[1] for row in report.samples.rows] == expected
    assert store.sql(report.samples.sql).fetchall() == report.samples.rows


def test_samples_are_taken_where_one_asks_for_them(store: Store) -> None:
    [low, high] = samples(store, "r", (0.1, 0.95)).rows
    whole = samples(store, "r", [i / 100 for i in range(101)]).rows
    assert low[2] == pytest.approx(0.1, abs=0.02)
    assert high[2] == pytest.approx(0.95, abs=0.02)
    assert {low[0], high[0]} <= {row[0] for row in whole}


def test_what_was_measured_once_is_before_or_after_the_run_and_not_both(store: Store) -> None:
    measured = {"attempt": 1, "job": "evaluate", "name": "eval/reward_mean"}
    store.append(
        "metrics",
        [
            measured | {"run_id": run, "step": step, "value": value}
            for run, step, value in (("a", 0, 0.1), ("b", 9, 0.9), ("c", 0, 0.2), ("c", 9, 0.8))
        ],
    )
    told = [
        {k: v for k, v in summary(store, run).items() if k.startswith("held_out")} for run in "abc"
    ]
    before, after = "held_out_reward_before", "held_out_reward_after"
    assert told == [{before: 0.1}, {after: 0.9}, {before: 0.2, after: 0.8}]


def test_two_runs_are_compared_by_settings_and_last_metrics(page: tuple[Report, str]) -> None:
    report, _ = page
    assert ("seed", "1", "0") in report.settings
    assert {key for key, _, _ in report.settings} == {"name", "seed"}
    assert report.metrics is not None
    assert report.metrics.rows == [("train/entropy", 1.0, 0.0, 1.0)]


def test_failures_and_findings_are_those_of_the_run(store: Store, page: tuple[Report, str]) -> None:
    report, html = page
    [(reason, count)] = report.failures["Rollouts dropped"].rows
    assert reason == "too <b>long"
    assert store.sql("SELECT count(drop_reason) FROM experiences").fetchall() == [(count,)]
    assert count > 0
    assert any("dropped" in one for found in report.findings.values() for one in found)
    assert "rlake audit drop --run r --steps 9:10 --against 1:2" in html


def test_a_run_that_trained_nothing_has_a_report_too(store: Store, tmp_path: Path) -> None:
    report = write_report(store, tmp_path / "s.html", "s")
    assert report.failures["Jobs that did not end well"].rows[0][3] == "out of <i>memory"
    assert report.findings == {}
    assert "No weights were published" in (tmp_path / "s.html").read_text()


def test_an_unknown_run_is_refused_with_the_nearest_name(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="run `rr` does not exist; did you mean `r`"):
        write_report(store, tmp_path / "x.html", "rr")
    assert list(tmp_path.iterdir()) == []
