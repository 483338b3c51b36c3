"""`rlake selftest`: recipes that are run to see that all of it learns, and the report of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import Command, last_json, refused
from support.tiny_models import offline, written

from rlake.loop.config.stages import load_stages
from rlake.loop.run import run
from rlake.loop.selftest.report import notes
from rlake.loop.selftest.run import RECIPES, Options, SelfTestResult, evaluated_tasks, staged
from rlake.store import Store, connect

SHORT = [
    "stages.warm_start.trainer.steps=2",
    "stages.warm_start.trainer.batch_size=4",
    "stages.learn.trainer.batch_size=1",
]


def test_a_task_that_is_not_there_and_a_folder_that_holds_something_are_refused(
    rlake: Command, tmp_path: Path
) -> None:
    refused(rlake("selftest", "countdwn"), "has no task `countdwn`; did you mean `countdown`?")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    refused(rlake("selftest", "countdown", "--folder", "full"), "exists and is not empty")
    refused(
        rlake("selftest", "gsm8k", "--folder", "new", "--data", "nowhere"),
        "`nowhere/train.jsonl` does not exist",
    )


@pytest.mark.parametrize("name", RECIPES)
def test_every_task_is_measured_before_and_after_what_the_options_change(name: str) -> None:
    last = "imitate" if name == "textworld" else "learn"
    options = Options(
        steps=3, seed=7, model="folder", engine="{transformers: {max_requests: 5}}",
        overrides=("trainer.weight_decay=0.5", f"stages.{last}.trainer.batch_size=2"),
    )  # fmt: skip
    stages = staged(name, options)
    kinds = [stage.kind for stage in stages]
    learn = [stage for stage in stages if stage.kind == "train"][-1].config
    assert kinds[-1] == "evaluate"
    assert kinds.count("evaluate") >= 2
    assert (learn.trainer.steps, learn.trainer.batch_size, learn.seed) == (3, 2, 7)
    assert learn.trainer.weight_decay == 0.5
    first = stages[kinds.index("train")].config.model
    assert (first.path, first.from_scratch) == ("folder", None)
    sampling = learn.explorer or learn.evaluate
    assert sampling is not None
    engine = sampling.engine
    assert engine is not None
    assert engine.transformers is not None
    assert engine.transformers.max_requests == 5


def test_a_task_says_whether_what_it_was_measured_on_was_trained_on(store: Store) -> None:
    rows = written(8)
    store.append("experiences", rows)
    measured = [
        replace(row, experience_id=f"eval/{i}", run_id="demo:eval-001", purpose="eval")
        for i, row in enumerate(rows)
    ]
    store.append("experiences", measured)
    found = evaluated_tasks(store)
    assert found == {"num_tasks": 2, "num_trained_on": 0}
    assert "evaluated on 2 held-out tasks" in notes(of_task(**found))
    run(store, offline(trainer={"where": "task_id = 't0' AND run_id IS NULL"}))
    found = evaluated_tasks(store)
    assert found == {"num_tasks": 2, "num_trained_on": 1}
    told = notes(of_task(**found, data="a generated stand-in for GSM8K"))
    assert "1 of the 2 evaluation tasks were also trained on" in told
    assert told.endswith("tasks: a generated stand-in for GSM8K")


def of_task(**known: Any) -> SelfTestResult:
    zeros = {"before": 0.0, "after": 0.0, "first_reward": 0.0, "last_reward": 0.0, "steps": 0}
    zeros |= {"seconds": 0.0, "samples": 0, "tokens": 0, "tokens_per_second": 0.0}
    given: dict[str, Any] = {"task": "t", "recipe": "r", "data": "d", "rewards": (), "store": "s"}
    return SelfTestResult(**{**zeros, **given, **known})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_bench_of_two_tasks_reports_what_its_stores_hold(
    rlake: Command, tmp_path: Path
) -> None:
    some = "taskset = 'frozen_squares' OR split <> 'train' AND right(task_id, 1) = '0'"
    few = [f"evaluate.where={some}", "evaluate.group_size=1", *SHORT]
    words = [word for text in few for word in ("--set", text)]
    names = ["frozen_lake", "countdown"]
    done = rlake("selftest", *names, "--steps", 2, "--folder", "here", "--json", *words)
    assert done.returncode == 0, done.stderr
    told = last_json(done)
    assert [one["task"] for one in told["tasks"]] == names
    for one in told["tasks"]:
        store = connect(tmp_path / "here" / one["task"], create=False)
        run = f"{one['recipe']}.learn"
        [(samples, tokens)] = store.sql(
            "SELECT count(*), sum(len(list_filter(loss_mask, lambda m: m))) FROM experiences "
            f"WHERE run_id = '{run}'"
        ).fetchall()
        assert (one["samples"], one["tokens"], one["steps"]) == (samples, tokens, 2)
        assert samples == {"frozen_lake": 24, "countdown": 16}[one["task"]]
    page = Path(told["report"]).read_text()
    assert "<td>frozen_lake</td>" in page
    assert "data:image/png;base64," in page
    assert Path(told["picture"]).stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gsm8k_is_read_from_a_folder_and_goes_through_all_parts(
    rlake: Command, gsm8k: Path, tmp_path: Path
) -> None:
    few = ["tasks.where=split = 'train' AND length(prompt_text) < 200", "trainer.batch_size=1"]
    few += ["evaluate.where=split = 'test' AND right(task_id, 2) = '00'"]
    few += [f"{part}.sampling.max_tokens=4" for part in ("explorer", "evaluate")]
    words = [word for text in few for word in ("--set", text)]
    options = ["--data", gsm8k, "--steps", 1, "--folder", "here", "--json"]
    done = rlake("selftest", "gsm8k", *options, *words)
    assert done.returncode == 0, done.stderr
    [one] = last_json(done)["tasks"]
    assert (one["steps"], one["samples"], one["after"]) == (1, 8, 0.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_of_gurus_format_go_through_all_parts(rlake: Command) -> None:
    few = ["trainer.batch_size=1", "algorithm={grpo: {group_size: 2}}"]
    few += ["evaluate.where=split = 'test' AND right(task_id, 2) = '00'"]
    few += [f"{part}.sampling.max_tokens=4" for part in ("explorer", "evaluate")]
    words = [word for text in few for word in ("--set", text)]
    done = rlake("selftest", "guru_math", "--steps", 1, "--folder", "here", "--json", *words)
    assert done.returncode == 0, done.stderr
    [one] = last_json(done)["tasks"]
    assert (one["steps"], one["samples"], one["after"]) == (1, 2, 0.0)
    assert "a generated stand-in for Guru" in one["data"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lakes_are_crossed_more_often_than_behind_the_warm_start(
    rlake: Command, tmp_path: Path
) -> None:
    assert load_stages("frozen_lake")[0].config.seed == 0  # no seed was picked
    done = rlake("selftest", "frozen_lake", "--folder", "here", "--json")
    assert done.returncode == 0, done.stderr
    [one] = last_json(done)["tasks"]
    assert 0.1 < one["before"] < 0.55
    assert one["after"] > one["before"] + 0.25
    assert one["last_reward"] > one["first_reward"] + 0.2
