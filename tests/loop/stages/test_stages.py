"""A configuration in stages: what each is, in what order they run, and how it goes on."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.tiny_models import SPEC, SUMS, table

import rlake
from rlake.loop import cli
from rlake.loop.config import RunConfig, build_stages, load, load_stages
from rlake.loop.config.stages import Stage, of_name
from rlake.loop.run import run
from rlake.loop.runs import job as jobs
from rlake.loop.runs.job import run_folder
from rlake.loop.stages import run_stages, standing
from rlake.loop.weight_sync.run_models import resolve_run_models
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError, NotFoundError, RlakeError
from rlake.store.lineage.policy import of_policy

SHARED: dict[str, Any] = {
    "name": "demo",
    "threads": 1,
    "model": {"from_scratch": SPEC},
    "tasks": SUMS,
    "data": {"generator": "rlake.loop.recipes.toys:expert_answers"},
    "schedule": {"timeout": 60},
    "trainer": {"batch_size": 2, "learning_rate": 1e-2, "checkpoint_every": 2},
    "evaluate": {"sampling": {"max_tokens": 3, "temperature": 0}},
}
STAGES: dict[str, Any] = {
    "warm_start": {"algorithm": "sft", "trainer": {"where": "source = 'expert'", "steps": 3}},
    "learn": {
        "algorithm": {"grpo": {"group_size": 3}},
        "explorer": {"rewards": "support.tiny_models:share_of_ones", "sampling": {"max_tokens": 3}},
        "trainer": {"steps": 4},
    },
    "measure": {"evaluate": {"where": "split = 'eval'"}},
}
FACTS = {
    "draws": (
        "SELECT run_id, step, position, experience_id, weight, lag, advantage, digest "
        "FROM draws_current ORDER BY run_id, step, position"
    ),
    "losses": (
        "SELECT run_id, step, value FROM metrics_current WHERE name = 'train/loss' "
        "ORDER BY run_id, step"
    ),
    "weights": (
        "SELECT run_id, policy_version, parent_run_id, digest FROM policies_current "
        "ORDER BY run_id, policy_version"
    ),
    "measured": (
        "SELECT run_id, name, step, value FROM metrics_current WHERE job = 'evaluate' "
        "ORDER BY run_id, name, step"
    ),
}


def staged(changes: Mapping[str, Any] | None = None, /, *sets: str) -> tuple[Stage, ...]:
    return build_stages({**SHARED, "stages": {**STAGES, **(changes or {})}}, sets)


def told(store: Store) -> dict[str, list[tuple[object, ...]]]:
    return {name: store.sql(query).fetchall() for name, query in FACTS.items()}


def stop_at(name: str, step: int) -> Any:
    """A listener that ends the process of a job, as Ctrl-C would."""

    def listen(job: str, at: int, metrics: Mapping[str, float]) -> None:
        if (job, at) == (name, step):
            raise KeyboardInterrupt

    return listen


def test_each_stage_lies_over_what_all_share_and_starts_from_the_one_before() -> None:
    warm, learn, measure = staged()
    assert [s.kind for s in (warm, learn, measure)] == ["train", "train", "evaluate"]
    assert (warm.config.name, learn.config.name) == ("demo.warm_start", "demo.learn")
    assert warm.config.model.from_scratch is not None
    assert (learn.config.model.from_scratch, learn.config.model.run) == (None, "demo.warm_start")
    assert learn.config.trainer.batch_size == 2
    assert learn.config.trainer.where is None, "a stage has nothing of another stage"
    assert measure.config.name == "demo.learn", "it measures the run before it"
    assert measure.label == "demo.measure"


def test_a_stage_may_start_from_a_model_of_its_own() -> None:
    path = staged({"learn": STAGES["learn"] | {"model": {"path": "folder"}}})[1].config.model
    assert (path.path, path.run, path.from_scratch) == ("folder", None, None)
    other = staged({"learn": STAGES["learn"] | {"model": {"run": "older"}}})[1].config.model
    assert (other.path, other.run, other.from_scratch) == (None, "older", None)
    same = staged({"learn": STAGES["learn"] | {"model": {"device": "cpu"}}})[1].config.model
    assert (same.device, same.run) == ("cpu", "demo.warm_start")


def test_a_stage_without_anything_before_it_measures_what_the_first_starts_from() -> None:
    before, warm = build_stages({**SHARED, "stages": {"before": None, "warm": STAGES["learn"]}})
    assert (before.kind, before.config) == ("evaluate", warm.config)


def test_what_the_command_sets_wins_over_every_stage() -> None:
    sets = ("trainer.steps=9", "evaluate.group_size=2", "name=x")
    warm, learn, measure = staged(None, *sets)
    assert [s.config.trainer.steps for s in (warm, learn)] == [9, 9]
    assert measure.config.evaluate is not None
    assert measure.config.evaluate.group_size == 2
    assert [s.label for s in (warm, learn, measure)] == ["x.warm_start", "x.learn", "x.measure"]
    assert learn.config.model.run == "x.warm_start"


def test_a_file_is_read_with_overrides_of_one_stage(tmp_path: Path) -> None:
    file = tmp_path / "staged.yaml"
    file.write_text(yaml.safe_dump({**SHARED, "stages": STAGES}, sort_keys=False))
    warm, learn, _ = load_stages(file, ["stages.learn.trainer.steps=7", "seed=5"])
    assert (warm.config.trainer.steps, learn.config.trainer.steps) == (3, 7)
    assert (warm.config.seed, learn.config.seed) == (5, 5)
    assert load_stages("grpo_arithmetic") == ()
    with pytest.raises(ConfigError, match=r"has stages.* warm_start, learn, measure with `--st"):
        load(file)
    with pytest.raises(ConfigError, match="stage `lern` does not exist; did you mean `learn`"):
        of_name([warm, learn], "lern")


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([{"algorithm": "sft"}], "`stages` must be names with what each stage says"),
        ({}, "`stages` must be names"),
        ({"a": {"evaluate": {}}}, "none of the stages a trains; give one an `algorithm`"),
        ({"a.b": {"algorithm": "sft"}}, "`stages.a.b`: a name is of letters, digits"),
        ({"a": "sft"}, "`stages.a` must hold keys and values, got 'sft'"),
        ({"a": {"name": "x", "algorithm": "sft"}}, "`stages.a.name` is for all stages"),
        ({"a": {"algorithm": "sft", "trainr": {}}}, "stage `a`: unknown key `trainr`"),
        (
            {"a": {"algorithm": "sft"}, "b": {"model": {"from_scratch": {}}}},
            "stage `b`: `model.from_scratch`: a stage that evaluates takes the weights of the "
            "run before",
        ),
        (
            {"a": {"algorithm": "sft"}, "b": {"pipeline": "x.yaml", "seed": 1}},
            "stage `b`: `seed` is not for a stage that runs a `pipeline`",
        ),
    ],
)
def test_stages_that_make_no_sense_are_refused_by_name(stages: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_stages({**SHARED, "stages": stages})
    assert str(caught.value).startswith(said)


def test_sft_then_grpo_then_a_pipeline_then_evaluation_are_runs_with_one_lineage(
    store: Store,
) -> None:
    pairs = {
        "source": {"sql": "SELECT * FROM experiences WHERE run_id = 'demo.learn'"},
        "operators": [{"pairs": {"strategy": "max_min"}}],
        "sink": {"table": "preferences"},
    }
    with_pairs = {
        "warm_start": STAGES["warm_start"],
        "learn": STAGES["learn"],
        "pairs": {"pipeline": pairs},
        "measure": STAGES["measure"],
    }
    run_stages(store, build_stages({**SHARED, "stages": with_pairs}))
    ran = "SELECT run_id, job, name FROM job_events WHERE status = 'done' ORDER BY created_at"
    assert set(store.sql(ran).fetchall()) == {
        ("demo.warm_start", "train", "demo.warm_start"),
        ("demo.learn", "explore", "demo.learn"),
        ("demo.learn", "train", "demo.learn"),
        ("demo.learn", "evaluate", "demo.measure"),
    }
    digest = "SELECT digest FROM policies WHERE run_id = '{}' AND policy_version = {}"
    last = store.sql(digest.format("demo.warm_start", 3)).fetchall()
    assert store.sql(digest.format("demo.learn", 0)).fetchall() == last
    assert of_policy(store, "demo.learn", 4).begun_from == "demo.warm_start:3"
    assert of_policy(store, "demo.learn", 4).parents == [3, 2, 1, 0]
    assert of_policy(store, "demo.warm_start", 3).begun_from is None
    assert table(store, "lineage")["pipeline"].to_list() == ["demo.pairs"]
    [config] = table(store, "runs WHERE job = 'train' AND run_id = 'demo.learn'", "DISTINCT config")
    assert json.loads(config[0])["model"] == {
        **json.loads(config[0])["model"],
        **{"run": "demo.warm_start", "version": 3, "digest": last[0][0], "path": None},
    }


@pytest.mark.slow
def test_a_stage_stopped_in_the_middle_goes_on_there_and_ends_as_if_it_never_stopped(
    store: Store, tmp_path: Path
) -> None:
    whole = rlake.connect(tmp_path / "whole")
    run_stages(whole, staged())
    for job, step in (("train", 2), ("explore", 2), ("train", 4)):  # the first is of warm_start
        with pytest.raises((KeyboardInterrupt, RlakeError)):
            run_stages(store, staged(), resume=True, listener=stop_at(job, step))
    with pytest.raises((KeyboardInterrupt, RlakeError)):
        run_stages(store, staged(), resume=True, listener=stop_at("evaluate", 4))
    run_stages(store, staged(), resume=True)
    assert told(store) == told(whole)
    attempts = store.sql(
        "SELECT run_id, job, max(attempt) FROM job_events WHERE job <> 'explore' "
        "GROUP BY ALL ORDER BY run_id DESC, job DESC"
    ).fetchall()
    assert attempts == [
        ("demo.warm_start", "train", 2),
        ("demo.learn", "train", 3),
        ("demo.learn", "evaluate", 1),
    ], "what is finished is not repeated"

    moved = shutil.copytree(store.uri, tmp_path / "moved")
    there = rlake.connect(moved)
    assert [done for _, done in standing(there, staged(), resume=True)] == [True] * 3
    with pytest.raises(ConfigError, match=r"run `demo.warm_start` was started before; continue"):
        run_stages(there, staged())
    _refuses_changes_of_what_is_finished(there)


def test_a_stage_that_failed_before_it_stored_anything_starts_anew(store: Store) -> None:
    warm, *_ = staged()
    assert isinstance(warm.config, RunConfig)
    with (
        pytest.raises(RuntimeError, match="no database"),
        jobs.job(store, warm.config, "train", resume=False) as mine,
        jobs.recorded(mine, start_step=1),
    ):
        raise RuntimeError("no database")
    assert next(standing(store, staged())) == (warm, False)


def _refuses_changes_of_what_is_finished(store: Store) -> None:
    for changes, said in (
        ("stages.warm_start.seed=4", "stage `warm_start`: run `demo.warm_start` was .* `seed`"),
        ("trainer.learning_rate=0.5", "another `trainer.learning_rate`"),
        ("evaluate.group_size=2", "stage `measure`: it was finished with another `evaluate`"),
        ("trainer.steps=9", "stage `warm_start`: it was finished with `trainer.steps` 3, now it"),
    ):
        part: dict[str, Any] = {}
        sets = [changes]
        if changes.startswith("stages."):
            part, sets = {"warm_start": STAGES["warm_start"] | {"seed": 4}}, []
        with pytest.raises(ConfigError, match=said):
            run_stages(store, staged(part, *sets), resume=True)


def test_the_last_stage_can_be_made_longer(store: Store) -> None:
    short = {name: STAGES[name] for name in ("warm_start", "learn")}
    run_stages(store, build_stages({**SHARED, "stages": short}))
    longer = {**short, "learn": STAGES["learn"] | {"trainer": {"steps": 5}}}
    run_stages(store, build_stages({**SHARED, "stages": longer}), resume=True)
    steps = store.sql("SELECT run_id, max(step) FROM draws_current GROUP BY ALL ORDER BY ALL")
    assert steps.fetchall() == [("demo.learn", 5), ("demo.warm_start", 3)]


def test_a_stage_that_fails_is_named_and_nothing_after_it_runs(store: Store) -> None:
    broken = {"learn": STAGES["learn"] | {"tasks": {"where": "split = 'none'"}}}
    with pytest.raises(ConfigError, match="stage `learn`: no task matches `split = 'none'`"):
        run_stages(store, staged(broken))
    assert {run for (run,) in store.sql("SELECT run_id FROM job_events").fetchall()} == {
        "demo.warm_start"
    }
    unknown = {"learn": STAGES["learn"] | {"algorithm": "gpro"}}
    with pytest.raises(ConfigError, match="stage `learn`: algorithm `gpro` does not exist"):
        run_stages(store, staged(unknown, "name=other"))
    assert not store.sql("SELECT run_id FROM job_events WHERE run_id LIKE 'other%'").fetchall()


def test_one_stage_runs_alone_when_the_one_before_it_has(store: Store) -> None:
    with pytest.raises(NotFoundError, match=r"`learn`: run `demo.warm_start` has published no we"):
        run_stages(store, staged(), only="learn")
    run_stages(store, staged(), only="warm_start")
    run_stages(store, staged(), only="learn")
    assert store.sql("SELECT DISTINCT run_id FROM policies ORDER BY 1").fetchall() == [
        ("demo.learn",),
        ("demo.warm_start",),
    ]


def test_a_run_goes_on_from_the_weights_it_began_with_and_only_from_these(store: Store) -> None:
    warm, learn, _ = staged()
    run(store, warm.config)
    run(store, learn.config)
    longer = warm.config.model_copy(
        update={"trainer": warm.config.trainer.model_copy(update={"steps": 5})}
    )
    run(store, longer, resume=True)
    assert resolve_run_models(store, learn.config).model.version == 3
    assert (
        resolve_run_models(store, learn.config.model_copy(update={"name": "new"})).model.version
        == 5
    )
    asked = learn.config.model.model_copy(update={"digest": "another"})
    with pytest.raises(JobError, match=r"`demo.warm_start:3` have digest .*, expected another"):
        resolve_run_models(store, learn.config.model_copy(update={"model": asked}))
    missing = learn.config.model.model_copy(update={"version": 4})
    with pytest.raises(ConfigError, match=r"no weights of version 4; there are \[0, 3, 5\]"):
        resolve_run_models(store, learn.config.model_copy(update={"model": missing}))

    weights = run_folder(store, warm.config) / "policies" / "v000003" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(JobError, match="is not what was published: its digest differs"):
        run(store, learn.config, resume=True)


def test_the_command_says_which_stage_runs_and_what_each_came_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "staged.yaml"
    file.write_text(yaml.safe_dump({**SHARED, "stages": STAGES}, sort_keys=False))
    lake = ["--store", str(tmp_path / "lake")]
    assert cli.run_command(["run", str(file), "--full"]) == cli.DONE
    plain = json.loads(capsys.readouterr().out)
    assert [part["does"] for part in plain.values()] == ["train", "train", "evaluate"]
    assert plain["learn"]["config"]["model"]["run"] == "demo.warm_start"
    assert not (tmp_path / "lake").exists()

    assert cli.run_command(["run", str(file), *lake, "--stage", "warm_start", "--json"]) == cli.DONE
    assert cli.run_command(["run", str(file), *lake, "--resume", "--json"]) == cli.DONE
    said = capsys.readouterr()
    assert "stage 1 of 3, warm_start: finished before\nstage 2 of 3, learn: run" in said.err
    assert "stage 3 of 3, measure: evaluates run demo.learn" in said.err
    told = json.loads(said.out.splitlines()[-1])["stages"]
    assert [told["learn"]["steps"], told["measure"]["num_rows"]] == [4, 5]

    assert cli.run_command(["train", str(file), *lake]) == cli.MISUSED
    assert "has stages" in capsys.readouterr().err
    assert cli.run_command(["evaluate", str(file), *lake, "--stage", "learn", "--json"]) == cli.DONE
    assert json.loads(capsys.readouterr().out)["policy_version"] == 4
    assert cli.run_command(["train", "grpo_arithmetic", *lake, "--stage", "learn"]) == cli.MISUSED
    assert "has no stages; leave `--stage` out" in capsys.readouterr().err


@pytest.mark.slow
def test_the_stages_of_one_process_give_the_same_weights_as_processes_of_their_own(
    store: Store,
) -> None:
    torch.manual_seed(11)  # nothing may come from a generator that an earlier stage moved
    run_stages(store, staged())
    first = told(store)["weights"]
    other = rlake.connect(Path(store.uri).with_name("other"))
    for name in STAGES:
        torch.manual_seed(12)
        run_stages(other, staged(), only=name)
    assert told(other)["weights"] == first
