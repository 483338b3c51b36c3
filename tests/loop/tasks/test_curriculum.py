"""Which tasks come when: each selector by its definition, what it learns, and how a run goes on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from support.builders import task
from support.jobs import CONFIG, finish, flags, kill_at, run_here, start
from support.tiny_models import config

import rlake
from rlake.loop.config import RunConfig
from rlake.loop.config.tasks import BotsConfig, TasksConfig
from rlake.loop.run import run
from rlake.loop.runs.job import Job
from rlake.loop.tasks.curriculum import Curriculum
from rlake.loop.tasks.curriculum.bots import Bots
from rlake.loop.tasks.curriculum.outcomes import PassRule, outcomes
from rlake.loop.tasks.curriculum.selectors import Outcomes, softmaxed, weighted
from rlake.store import Experience, Store
from rlake.store.errors import ConfigError, JobError, QueryError

CHOSEN = (
    "SELECT batch, position, task_id, selector, score, expected FROM task_selections "
    "WHERE attempt = (SELECT max(attempt) FROM task_selections s "
    "WHERE s.batch = task_selections.batch) ORDER BY batch, position"
)
BELIEVED = (
    "SELECT DISTINCT task_id, alpha, beta, capability, rho FROM task_estimates "
    "WHERE batch = (SELECT max(batch) FROM task_estimates) ORDER BY task_id"
)


def job(store: Store, **tasks: Any) -> Job:
    """A first attempt of an explorer, over the tasks that are stored."""
    settings = config(tasks={"generator": None, **tasks})
    return Job(store, settings, "explore", 1, Path(store.root))


def curriculum(store: Store, n: int = 6, *, batch_size: int = 4, **tasks: Any) -> Curriculum:
    if not store.count("tasks"):
        store.append("tasks", [task(i) for i in range(n)])
    return Curriculum(job(store, **tasks), batch_size=batch_size, group_size=2)


def answers(batch: Sequence[rlake.Task]) -> list[int]:
    return [int(one.answer or 0) for one in batch]


def tried(store: Store, step: int, rewards: Mapping[str, Sequence[float | None]]) -> None:
    """Store what a batch of the run came to, by task."""
    store.append(
        "experiences",
        [
            Experience(
                task_id=task_id,
                experience_id=f"{step}/{place}/{i}",
                group_id=f"{step}/{place}",
                rollout_index=i,
                run_id="demo",
                batch=step,
                reward=reward,
            )
            for place, (task_id, given) in enumerate(rewards.items())
            for i, reward in enumerate(given)
        ],
    )


def try_all(store: Store, step: int, batch: Sequence[rlake.Task]) -> None:
    """Small sums are solved, large ones are not."""
    tried(store, step, {t.task_id: [float(int(t.answer or 0) < 6), 0.0] for t in batch})


# orders


def test_sequential_goes_through_all_tasks_by_id_and_begins_again(store: Store) -> None:
    made = curriculum(store, selector="sequential")
    ids = [t.task_id for b in (1, 2, 3) for t in made.batch(b)]
    assert ids == sorted(set(ids)) * 2


def test_shuffle_gives_every_task_once_before_any_comes_again(store: Store) -> None:
    made = curriculum(store, selector="shuffle")
    ids = [t.task_id for b in (1, 2, 3) for t in made.batch(b)]
    assert len(set(ids[:6])) == len(set(ids[6:])) == 6
    assert ids[:6] != ids[6:]


def test_random_takes_a_task_once_a_batch_or_puts_it_back(store: Store) -> None:
    once = curriculum(store, selector="random")
    assert all(len({t.task_id for t in once.batch(b)}) == 4 for b in range(1, 9))
    config_ = {"random": {"replacement": True}}
    again = curriculum(rlake.connect(f"{store.root}-2"), 3, batch_size=50, selector=config_)
    counts = Counter(answers(again.batch(1)))
    assert len(counts) == 3
    assert max(counts.values()) > 1


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ({"easy_to_hard": {"by": "nullif(answer::INT, 4)"}}, [0, 2, 6, 8, 10, 4]),
        ({"hard_to_easy": {"by": "nullif(answer::INT, 4)"}}, [10, 8, 6, 2, 0, 4]),
        ({"easy_to_hard": {"by": "difficulty"}}, [10, 8, 0, 2, 4, 6]),
    ],
)
def test_ordered_tasks_come_by_a_number_and_those_without_one_last(
    store: Store, select: dict[str, Any], expected: list[int]
) -> None:
    store.append("tasks", [task(i) for i in range(6)])
    values = [
        {"task_id": task(i).task_id, "name": "difficulty", "version": "1", "value": -float(i)}
        for i in (4, 5)
    ]
    store.append("task_values", values)
    made = curriculum(store, selector=select)
    got = answers([*made.batch(1), *made.batch(2)])
    assert got[:2] == expected[:2]
    assert sorted(got[:6]) == sorted(expected)
    if "difficulty" not in str(select):
        assert got[:6] == expected


# what a try came to


@pytest.mark.parametrize(
    ("changes", "row", "expected"),
    [
        ({}, {"reward": 1.0}, 1.0),
        ({}, {"reward": 0.99}, 0.0),
        ({}, {"reward": None}, None),
        ({}, {"reward": 0.2, "metrics": {"accuracy": 1.0}}, 1.0),
        ({}, {"reward": 1.5, "rewards": {"accuracy": 0.0, "format": 1.5}}, 0.0),
        ({"pass_metric": "exact"}, {"reward": 0.0, "rewards": {"exact": 1.0}}, 1.0),
        ({"pass_metric": "exact"}, {"reward": 1.0, "rewards": {"format": 1.0}}, None),
        ({"pass_metric": "exact"}, {"reward": 1.0, "rewards": {"exact": None}}, None),
        ({"pass_threshold": 0.5}, {"reward": 0.5}, 1.0),
        ({"pass_threshold": -0.5}, {"reward": -1.0}, 0.0),
    ],
)
def test_a_try_passes_by_its_accuracy_and_not_by_a_shaped_reward(
    store: Store, changes: dict[str, Any], row: dict[str, Any], expected: float | None
) -> None:
    rollouts = [Experience(task_id="t", experience_id="e", group_id="g", **row)]
    store.append("experiences", rollouts)
    rule = PassRule({"t"}, *TasksConfig(**changes).passes(""))
    found = outcomes(store.scan("experiences").collect(), rule)
    assert found["passes"].to_list() == ([] if expected is None else [expected])
    if not changes:
        [(rate,)] = store.sql("SELECT pass_rate FROM task_pass_rates").fetchall()
        assert rate == expected


def test_a_try_of_several_rows_counts_once(store: Store) -> None:
    rows = [(0, 1.0), (0, 1.0), (0, 0.0), (1, 0.0), (2, None)]
    rollouts = [
        Experience(
            task_id="t", experience_id=f"e{i}", group_id="g", rollout_index=rollout, reward=reward
        )
        for i, (rollout, reward) in enumerate(rows)
    ]
    store.append("experiences", rollouts)
    found = outcomes(store.scan("experiences").collect(), PassRule({"t"}, None, 1.0))
    assert found.select("passes", "rollouts").rows() == [(pytest.approx(2 / 3), 2.0)]


# BOTS, by an independent calculation


def by_the_paper(
    batches: Sequence[Mapping[int, tuple[float, float]]],
    *,
    weak: Sequence[float | None],
    strong: Sequence[float | None],
    forget: float,
    rho: float,
    rollouts: float,
    epoch: float,
) -> tuple[list[float], list[float], float | None]:
    """Follow arXiv:2510.26374 task by task, in plain Python."""
    size = len(weak)
    alpha, beta, capability = [1.0] * size, [1.0] * size, None
    for batch in batches:
        known = [k for k in batch if weak[k] is not None and strong[k] is not None]
        if known:
            rate = sum(batch[k][0] / batch[k][1] for k in known) / len(known)
            low = sum(weak[k] or 0.0 for k in known) / len(known)
            high = sum(strong[k] or 0.0 for k in known) / len(known)
            if abs(high - low) > 1e-6:
                now = (rate - low) / (high - low)
                capability = now if capability is None else 0.9 * capability + 0.1 * now
        for k in range(size):
            s = f = 0.0
            lasting = weak[k] is None or strong[k] is None
            fade = 1 - 0.5 ** (1 / epoch) if lasting else forget
            if k in batch:
                s, f = batch[k][0], batch[k][1] - batch[k][0]
            elif capability is not None and weak[k] is not None and strong[k] is not None:
                low, high = weak[k] or 0.0, strong[k] or 0.0
                inferred = min(1.0, max(0.0, low + (high - low) * capability))
                s, f = rho * inferred * rollouts, rho * (1 - inferred) * rollouts
            alpha[k] = (1 - fade) * alpha[k] + fade * 1.0 + s
            beta[k] = (1 - fade) * beta[k] + fade * 1.0 + f
    return alpha, beta, capability


@pytest.mark.parametrize("anchored", [True, False])
def test_bots_believes_what_the_paper_says(anchored: bool) -> None:  # noqa: FBT001
    weak: list[float | None] = [0.1, 0.0, None, 0.5, 0.2] if anchored else [None] * 5
    strong: list[float | None] = [0.9, 0.3, 0.8, 1.0, 0.6] if anchored else [None] * 5
    batches = [{0: (3.0, 4.0), 2: (0.0, 4.0)}, {2: (1.0, 3.0)}, {}, {1: (0.0, 4.0), 4: (4.0, 4.0)}]
    as_numbers = [np.array([np.nan if v is None else v for v in one]) for one in (weak, strong)]
    selector = Bots(
        BotsConfig(decay=0.15, rho=0.3),
        size=5,
        rollouts=4,
        epoch=7.0,
        weak=as_numbers[0],
        strong=as_numbers[1],
    )
    for batch in batches:
        told = np.array(list(batch.values())).reshape(-1, 2)
        selector.learn(Outcomes(np.array(list(batch), np.int64), told[:, 0], told[:, 1]))
    alpha, beta, capability = by_the_paper(
        batches, weak=weak, strong=strong, rollouts=4, epoch=7.0, forget=0.15, rho=0.3
    )
    assert selector.beliefs.alpha.tolist() == pytest.approx(alpha, abs=1e-12)
    assert selector.beliefs.beta.tolist() == pytest.approx(beta, abs=1e-12)
    assert selector.beliefs.capability == (capability and pytest.approx(capability, abs=1e-12))
    if not anchored:
        assert selector.beliefs.alpha[3] == selector.beliefs.beta[3] == 1.0, "nothing was inferred"


def test_adaptive_rho_is_halved_when_inferred_rates_are_wrong_by_a_quarter() -> None:
    weak, strong = np.zeros(2), np.ones(2)
    selector = Bots(
        BotsConfig(adaptive_rho=True, rho=0.4),
        size=2,
        rollouts=4,
        epoch=1.0,
        weak=weak,
        strong=strong,
    )
    near = Outcomes(np.array([0, 1]), np.array([2.0, 1.0]), np.array([4.0, 4.0]))
    selector.learn(near)  # inferred 0.375 of each, and seen 0.5 and 0.25
    assert selector.beliefs.rho == 0.4
    far = Outcomes(np.array([0, 1]), np.array([4.0, 0.0]), np.array([4.0, 4.0]))
    selector.learn(far)
    assert selector.beliefs.rho == 0.2


def test_bots_takes_the_tasks_nearest_to_the_target_at_temperature_zero() -> None:
    selector = Bots(BotsConfig(thompson_sampling=False, target=0.5), size=4, rollouts=8, epoch=2.0)
    selector.beliefs.count(Outcomes(np.arange(4), np.array([0.0, 3.0, 5.0, 8.0]), np.full(4, 8.0)))
    chosen = selector.choose(2, first=0, rng=np.random.default_rng(0))
    assert sorted(chosen.places.tolist()) == [1, 2]
    assert chosen.expected is not None
    assert chosen.scores is not None
    assert chosen.expected.tolist() == [4 / 10, 6 / 10]
    assert chosen.scores.tolist() == pytest.approx([-0.1, -0.1])


def test_places_are_drawn_in_proportion_to_weights_and_to_the_softmax_of_scores() -> None:
    rng, times = np.random.default_rng(0), 4000
    weights = np.array([1.0, 0.0, 3.0])
    first = Counter(int(weighted(weights, 1, rng)[0]) for _ in range(times))
    assert first[2] / times == pytest.approx(0.75, abs=0.03)
    assert first[1] == 0
    assert sorted(weighted(weights, 3, rng).tolist()) == [0, 1, 2], "the rest is filled up"
    assert weighted(weights, 3, rng)[2] == 1
    scores = np.array([0.0, np.log(3.0) * 0.5])
    hot = Counter(int(softmaxed(scores, 1, 0.5, rng)[0]) for _ in range(times))
    assert hot[1] / times == pytest.approx(0.75, abs=0.03)


# learning from the rollouts, and the record of it


@pytest.mark.parametrize("select", ["by_pass_rate", {"bots": {"thompson_sampling": False}}])
def test_tasks_that_are_always_or_never_solved_come_more_rarely(store: Store, select: Any) -> None:
    made = curriculum(store, 12, selector=select)
    seen: Counter[int] = Counter()
    for number in range(1, 25):
        batch = made.batch(number)
        seen.update(answers(batch))
        try_all(store, number, batch)  # small sums: half of the rollouts pass
    often = sum(n for answer, n in seen.items() if answer < 6) / 3
    rarely = sum(n for answer, n in seen.items() if answer >= 6) / 9
    assert often > 1.5 * rarely
    assert min(seen.values()) > 1, "what was too hard is tried again"


@pytest.mark.parametrize(
    "tasks",
    [
        {"selector": "by_pass_rate"},
        {
            "selector": {"bots": {"weak": "0.1", "strong": "answer::INT / 30"}},
            "save_estimates_every": 2,
        },
        {"selector": "random", "mixture": {"default": {"weight": 1, "selector": "bots"}}},
    ],
)
def test_a_curriculum_that_is_made_again_goes_on_as_if_it_had_not_stopped(
    store: Store, tasks: dict[str, Any]
) -> None:
    whole, again = curriculum(store, 8, **tasks), None
    for number in range(1, 6):
        batch = whole.batch(number)
        again = Curriculum(job(store, **tasks), batch_size=4, group_size=2)
        again.learn(until=number)
        beliefs = [[p.learner and p.learner.beliefs for p in c._parts] for c in (whole, again)]  # pyright: ignore[reportPrivateUsage]
        for one, other in zip(*beliefs, strict=True):
            assert one is not None
            assert other is not None
            assert one.alpha.tolist() == other.alpha.tolist()
            assert one.beta.tolist() == other.beta.tolist()
            assert (one.capability, one.rho) == (other.capability, other.rho)
        try_all(store, number, batch)
    recorded = store.sql("SELECT count(*), count(DISTINCT (batch, position)) FROM task_selections")
    assert recorded.fetchall() == [(20, 20)]


def test_a_batch_that_is_on_record_is_tried_as_it_was_chosen(store: Store) -> None:
    chosen = curriculum(store, selector="random").batch(1)
    store.append("tasks", [task(20)])  # comes after the run began, and changes nothing
    again = Curriculum(job(store, selector="random"), batch_size=4, group_size=2)
    assert again.batch(1) == chosen
    assert store.count("task_selections") == 4


def test_a_weight_sees_pass_rates_columns_and_values_of_tasks(store: Store) -> None:
    store.append("tasks", [task(i) for i in range(6)])
    value = {"task_id": task(1).task_id, "name": "quality", "version": "1", "value": 1.0}
    store.append("task_values", [value])
    weight = "(coalesce(quality, 0) + (answer = '4')::INT) * pass_rate * (num_rollouts = 0)::INT"
    made = curriculum(store, batch_size=2, selector={"by_pass_rate": {"weight": weight}})
    assert sorted(answers(made.batch(1))) == [2, 4]
    [(scores,)] = store.sql("SELECT list(score) FROM task_selections").fetchall()
    assert scores == [0.5, 0.5]


def test_rollouts_of_runs_before_count_when_the_history_says_so(store: Store) -> None:
    store.append("tasks", [task(i) for i in range(6)])
    before = [
        Experience(
            task_id=task(i % 6).task_id,
            experience_id=f"old/{i}",
            group_id=f"old/{i % 6}",
            rollout_index=i // 6,
            run_id="yesterday",
            reward=float(i % 6 == 3 and i // 6 == 0),
        )
        for i in range(12)
    ]
    store.append("experiences", before)
    bots = {"history": "run_id = 'yesterday'", "thompson_sampling": False}
    made = curriculum(store, batch_size=1, selector={"bots": bots})
    assert answers(made.batch(1)) == [6], "the one that was solved in half of the rollouts"
    [(expected,)] = store.sql("SELECT expected FROM task_selections").fetchall()
    assert expected == 0.5


# mixtures


def test_each_batch_of_a_mixture_has_tasks_of_all_sets_by_their_weights(store: Store) -> None:
    for name in ("easy", "hard", "other"):
        asked = [rlake.Task.ask(f"{i}+1=", str(i), taskset=name) for i in range(9)]
        store.append("tasks", asked)
    mix = {"easy": 3, "hard": {"weight": 1, "selector": {"hard_to_easy": {"by": "answer::INT"}}}}
    made = curriculum(store, batch_size=6, mixture=mix, selector="shuffle")
    batches = [made.batch(number) for number in range(1, 9)]
    sets = [Counter(t.taskset for t in batch) for batch in batches]
    assert {(one["easy"], one["hard"], one["other"]) for one in sets} == {(4, 2, 0), (5, 1, 0)}
    assert sum(one["hard"] for one in sets) == 12
    hard = [int(t.answer or 0) for batch in batches for t in batch if t.taskset == "hard"]
    assert hard == [8, 7, 6, 5, 4, 3, 2, 1, 0, 8, 7, 6]
    easy = [t.task_id for batch in batches for t in batch if t.taskset == "easy"]
    assert all(len(set(easy[i : i + 9])) == 9 for i in (0, 9, 18))


def test_each_taskset_of_a_mixture_passes_by_its_own_metric(store: Store) -> None:
    """Neither taskset has the other's part of the reward, and thresholds differ."""
    asked = [rlake.Task.ask(f"{i}?", taskset=name) for name in ("a", "b") for i in range(2)]
    store.append("tasks", asked)
    bots = {"selector": {"bots": {"decay": 0.0}}}
    mix = {
        "a": {**bots, "pass_metric": "right"},
        "b": {**bots, "pass_threshold": 0.25, "group_size": 5},
    }
    made = curriculum(store, batch_size=4, mixture=mix, pass_metric="close")
    batch = made.batch(1)
    values = {"a": {"right": 1.0, "long": 0.0}, "b": {"close": 0.5, "long": 0.0}}
    rows = [
        Experience(
            task_id=one.task_id,
            experience_id=f"demo/{i}",
            group_id=f"g{i}",
            run_id="demo",
            batch=1,
            group_index=i,
        ).with_reward(values[one.taskset])
        for i, one in enumerate(batch)
    ]
    store.append("experiences", rows)
    made.learn(until=2)
    for part in made._parts:  # pyright: ignore[reportPrivateUsage]
        assert part.learner is not None
        assert part.learner.beliefs.alpha.tolist() == [2.0, 2.0], part.name
        assert part.learner.beliefs.beta.tolist() == [1.0, 1.0], part.name
    rollouts = {p.name: p.selector._rollouts for p in made._parts}  # pyright: ignore
    assert rollouts == {"a": 2.0, "b": 5.0}


# bad input


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({"where": "false"}, "no task matches `false`"),
        (
            {"mixture": {"defualt": 1}},
            "`tasks.mixture` names the taskset `defualt`.*did you mean `default`",
        ),
        (
            {"selector": "random"},
            "a batch needs 7 tasks, and `random.* takes each of 6 once at most",
        ),
        ({"selector": "bots"}, "a batch needs 7 tasks"),
        ({"selector": {"easy_to_hard": {"by": "prompt_text"}}}, "gives String, expected a number"),
        (
            {"selector": {"easy_to_hard": {"by": "anwser::INT"}}},
            "easy_to_hard.by`.*`anwser`.*`answer`",
        ),
        (
            {"selector": {"easy_to_hard": {"by": "answer::INT +"}}},
            "`tasks.selector.easy_to_hard.by`",
        ),
        ({"selector": {"easy_to_hard": {"by": "NULL::INT"}}}, "is NULL for all 6 tasks"),
        ({"selector": {"easy_to_hard": {"by": "prompt_text::INT"}}}, "easy_to_hard.by`: .*convert"),
        ({"selector": {"easy_to_hard": {"by": "'inf'::DOUBLE"}}}, "must be finite or NULL"),
        ({"selector": {"bots": {"weak": "2.0", "strong": "1.0"}}}, "from 0 to 1, got 2"),
        ({"selector": {"bots": {"weak": "f0", "strong": "f1"}}}, "bots.weak`.*`f0`"),
        ({"selector": {"bots": {"history": "runid = 'a'"}}}, "`history`.*`runid`"),
        (
            {"selector": {"by_pass_rate": {"weight": "pass_rate - 1"}}},
            "at least 0 a task, got -0.5",
        ),
        (
            {"selector": {"by_pass_rate": {"weight": "pas_rate"}}},
            "`by_pass_rate.weight`.*`pas_rate`",
        ),
        ({"selector": {"by_pass_rate": {"weight": "avg(pass_rate)"}}}, "got 1 for 6 tasks"),
    ],
)
def test_what_cannot_be_chosen_by_is_said_before_any_work(
    store: Store, tasks: dict[str, Any], said: str
) -> None:
    size = 7 if "batch needs" in said else 4
    with pytest.raises((ConfigError, QueryError), match=said):
        curriculum(store, 6, batch_size=size, **tasks)


def test_an_accuracy_that_no_row_has_ends_the_run_with_the_nearest_name(store: Store) -> None:
    made = curriculum(store, selector="bots", pass_metric="acuracy")
    batch = made.batch(1)
    rows = [
        Experience(
            task_id=t.task_id,
            experience_id=f"e{i}",
            group_id=f"g{i}",
            run_id="demo",
            batch=1,
            metrics={"accuracy": 1.0},
        )
        for i, t in enumerate(batch)
    ]
    store.append("experiences", rows)
    with pytest.raises(JobError, match=r"has `acuracy` in .*did you mean `accuracy`"):
        made.batch(2)


# whole runs


def settings(steps: int, select: Any) -> RunConfig:
    tasks = {"selector": select, "pass_threshold": 0.3, "save_estimates_every": 4}
    return config(tasks=tasks, trainer={"steps": steps})


def record(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    return {query: store.sql(query).fetchall() for query in (CHOSEN, BELIEVED)}


def test_a_run_that_is_resumed_chooses_what_the_uninterrupted_one_chose(
    store: Store, tmp_path: Path
) -> None:
    select = {"bots": {"weak": "0.1", "strong": "0.9"}}
    whole = rlake.connect(tmp_path / "whole")
    run(whole, settings(6, select))
    run(store, settings(3, select))
    run(store, settings(6, select), resume=True)
    assert record(store) == record(whole)
    assert len(record(store)[CHOSEN]) == 12


@pytest.mark.slow
def test_a_killed_run_and_two_processes_choose_what_one_run_chose(tmp_path: Path) -> None:
    assert "even_digits" in CONFIG, "its rewards are thirds"
    sets = ["tasks.selector=bots", "tasks.pass_threshold=0.6"]
    args = ["small.yaml", "--store", "lake", *flags(sets)]
    folders = [tmp_path / name for name in ("whole", "killed", "two")]
    for folder in folders:
        folder.mkdir()
    whole, killed, two = folders
    run_here(whole, *sets)
    kill_at(start(killed, "run", *args), killed / "lake", step=6)
    kill_at(start(killed, "run", *args, "--resume"), killed / "lake", step=11)
    run_here(killed, *sets, resume=True)
    explorer, trainer = start(two, "explore", *args), start(two, "train", *args)
    finish(explorer)
    finish(trainer)
    one, *others = [record(rlake.connect(folder / "lake")) for folder in folders]
    assert len(one[CHOSEN]) == 64
    assert len(one[BELIEVED]) == 20
    assert others == [one, one]
    rates = pl.Series([row[1] / (row[1] + row[2]) for row in one[BELIEVED]])
    assert rates.n_unique() > 5, "beliefs that are all alike show nothing"


def says_its_digit(task: rlake.Task, experience: Experience) -> float:
    """Random weights name a digit now and then, and never four in a row."""
    return float((task.answer or "?") in (experience.response_text or ""))


@pytest.mark.slow
def test_more_groups_teach_something_when_tasks_are_chosen_by_what_was_learned(
    tmp_path: Path,
) -> None:
    asked = [rlake.Task.ask(f"{i}=", str(i)) for i in (*range(8), *range(1000, 9000, 250))]
    shares = {}
    for name in ("shuffle", "by_pass_rate", "bots"):
        store = rlake.connect(tmp_path / name)
        store.append("tasks", asked)
        parts = {"rewards": f"{__name__}:says_its_digit"}
        tasks = {"generator": None, "selector": name}
        trainer = {"steps": 40, "batch_size": 6, "learning_rate": 1e-3}
        algorithm = {"grpo": {"group_size": 8}}
        run(store, config(tasks=tasks, explorer=parts, trainer=trainer, algorithm=algorithm))
        [(shares[name],)] = store.sql(
            "SELECT avg((reward_max > reward_min)::INT) FROM groups WHERE batch > 10"
        ).fetchall()
    assert min(shares["by_pass_rate"], shares["bots"]) > 1.5 * shares["shuffle"] > 0
