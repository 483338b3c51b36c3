"""What rows of each workflow are credited with by each algorithm, against loops in float64."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np
import polars as pl
import pytest
import torch
from support.builders import rows as frame_of
from support.rollouts import run_tasks
from support.tiny_models import config, table

from rlake.loop.algorithms import resolve
from rlake.loop.environments.environment import Shown, Step
from rlake.loop.inference.policy import Sampling
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.losses.batch import examples
from rlake.loop.losses.gae import whitened
from rlake.loop.rollouts.group import RolloutSpec, workflow_of
from rlake.loop.run import run
from rlake.loop.trajectories.rewards import rewards_of
from rlake.store import Experience, Store, Task
from rlake.store.records import Message

GAMMA: Final = 0.95
Credit = dict[str, float]


def own_reward(at: int, answer: str) -> float:
    """The reward of a step of `Walk`; an episode that ends has 0.25 at its last one, always."""
    return 0.5 - 0.25 * at if answer == "+" else -0.125


class Walk:
    """Counts up at each `+`, ends at 2, and rewards each step."""

    def __init__(self) -> None:
        self._at = 0

    async def reset(self, task: Task) -> Shown:
        return "at 0"

    async def step(self, answer: Message) -> Step:
        said = "+" if answer["content"] == "+" else "-"
        reward = own_reward(self._at, said)
        self._at += said == "+"
        return Step(shown=f"at {self._at}", reward=reward, is_done=self._at == 2)

    async def close(self) -> None:
        """Nothing is open."""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


WALK: Final = {"environment": f"{__name__}:Walk", "max_turns": 4}
CALL: Final = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
WALKS: Final = [*"+-+++-+--++++-++-+-+--+", *"-++--+-+++-++--+"]
"""Answers to the environment, in the order in which they are asked for."""
WORKFLOWS: dict[str, tuple[Any, list[str]]] = {
    "single_turn": ("single_turn", ["42", "7", "42", "8", "9"]),
    **{
        f"step_wise-{rule}": ({"step_wise": {**WALK, "rewards": rule, "gamma": 0.5}}, WALKS)
        for rule in ("last", "all", "discounted", "own")
    },
    "multi_turn": ({"multi_turn": WALK}, WALKS),
    "retry_from_step": ({"retry_from_step": WALK}, [*WALKS[:5], "Step 2.", *WALKS[5:]]),
    "react": ({"react": {"tools": [f"{__name__}:add"]}}, ["42", "7", "3", "42", "8"]),
    "tool_calls": ("tool_calls", [CALL, "none", CALL, CALL, "none"]),
    "reflect_and_retry": ("reflect_and_retry", ["7", "Hm.", "42", "42", "3", "Oh.", "5"]),
}
STEPS: Final = [
    *("single_turn", "multi_turn", "react", "tool_calls"),
    *(name for name in WORKFLOWS if name.startswith("step_wise")),
]
"""Workflows whose rows of one rollout follow each other; those that try again have others."""


@cache
def made_by(workflow: str) -> tuple[Experience, ...]:
    """Two groups of four rollouts, as an explorer makes them."""
    spec, answers = WORKFLOWS[workflow]
    trying = RolloutSpec(
        workflow=workflow_of(spec),
        rewards=rewards_of("exact_match"),
        group_size=4,
        sampling=Sampling(max_tokens=6),
        seed=0,
        run_id="demo",
    )
    function = {"name": "add", "parameters": {"type": "object"}}
    expected = [{"name": "add", "arguments": {"a": 2}}]
    metadata = {"tools": [function], "tool_calls": expected}
    tasks = [replace(Task.ask(f"{n}+40?", "42"), metadata=metadata) for n in (1, 2)]
    rows = asyncio.run(run_tasks(list(enumerate(tasks)), ScriptedPolicy(answers), trying, batch=1))
    assert {row.drop_reason for row in rows} == {None}
    return tuple(rows)


@dataclass(frozen=True)
class Rollout:
    """One rollout of a group: its rows, and the reward of each of its steps."""

    rows: Sequence[Experience]
    own: Sequence[float]


def groups_of(rows: Sequence[Experience], workflow: str) -> list[list[Rollout]]:
    """What algorithms of several steps see; rewards of steps are those of the environment."""
    found: dict[str, dict[int, list[Experience]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[str(row.group_id)][row.rollout_index].append(row)
    return [
        [Rollout(steps, _own(steps, workflow)) for steps in rollouts.values()]
        for rollouts in found.values()
    ]


def _own(rows: Sequence[Experience], workflow: str) -> list[float]:
    if not workflow.startswith("step_wise"):
        return [float(row.reward or 0.0) for row in rows]
    places = [int((row.prompt_text or "")[-1]) for row in rows]
    own = [own_reward(at, r.response_text or "") for at, r in zip(places, rows, strict=True)]
    is_sparse = workflow.endswith(("last", "all"))
    return [0.0] * (len(own) - 1) + [sum(own)] if is_sparse else own


def scaled(values: Sequence[float], *, std: bool = False) -> np.ndarray:
    v = np.array(values, np.float64)
    apart = v - v.mean() if len(v) > 1 else v * 0.0
    return apart / (v.std(ddof=1) + 1e-6) if std and len(v) > 1 and np.ptp(v) else apart


def gigpo(groups: Sequence[Sequence[Rollout]]) -> Credit:
    """Equations 3 to 8 of arXiv:2505.10978, with the factor 1 for a deviation."""
    found: Credit = {}
    for group in groups:
        first = scaled([sum(rollout.own) for rollout in group])
        anchors: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for rollout, of_rollout in zip(group, first, strict=True):
            for t, row in enumerate(rollout.rows):
                later = sum(GAMMA**k * reward for k, reward in enumerate(rollout.own[t:]))
                anchors[str(row.prompt_text)].append((str(row.experience_id), later))
                found[str(row.experience_id)] = float(of_rollout)
        for one in anchors.values():
            for (name, _), credit in zip(one, scaled([r for _, r in one]), strict=True):
                found[name] += float(credit)
    return found


def multi_step(groups: Sequence[Sequence[Rollout]]) -> Credit:
    """All steps of a rollout have the z-score of its outcome."""
    return {
        str(row.experience_id): float(credit)
        for group in groups
        for rollout, credit in zip(
            group, scaled([sum(rollout.own) for rollout in group], std=True), strict=True
        )
        for row in rollout.rows
    }


def by_group(
    formula: Callable[[np.ndarray], np.ndarray],
) -> Callable[[Sequence[Experience]], Credit]:
    def credit(rows: Sequence[Experience]) -> Credit:
        groups: dict[str, list[Experience]] = defaultdict(list)
        for row in rows:
            groups[str(row.group_id)].append(row)
        found: Credit = {}
        for group in groups.values():
            values = formula(np.array([row.reward for row in group], np.float64))
            names = [str(row.experience_id) for row in group]
            found |= dict(zip(names, values.tolist(), strict=True))
        return found

    return credit


def at_once(
    formula: Callable[[np.ndarray], np.ndarray],
) -> Callable[[Sequence[Experience]], Credit]:
    def credit(rows: Sequence[Experience]) -> Credit:
        values = formula(np.array([row.reward for row in rows], np.float64))
        names = [str(row.experience_id) for row in rows]
        return dict(zip(names, values.tolist(), strict=True))

    return credit


def without_each(rewards: np.ndarray) -> np.ndarray:
    if len(rewards) == 1:
        return rewards * 0.0
    return np.array([r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)])


FORMULAS: Mapping[str, Callable[[Sequence[Experience]], Credit]] = {
    "grpo": by_group(lambda r: scaled(r.tolist(), std=True)),
    "dr_grpo": by_group(lambda r: scaled(r.tolist())),
    "rloo": by_group(without_each),
    "opmd": by_group(lambda r: scaled(r.tolist())),
    "reinforce": at_once(lambda r: r - r.mean()),
    "topr": at_once(lambda r: r),
}


def credited(algorithm: Any, rows: Sequence[Experience]) -> pl.DataFrame:
    operator = resolve(algorithm).advantage()
    assert operator is not None
    return operator(frame_of(list(rows)).with_columns(advantage=pl.lit(None, pl.Float64)))


def found_by(algorithm: Any, rows: Sequence[Experience]) -> Credit:
    return dict(credited(algorithm, rows).select("experience_id", "advantage").iter_rows())


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize("algorithm", FORMULAS)
def test_rows_of_every_workflow_have_the_credit_of_the_formula(
    algorithm: str, workflow: str
) -> None:
    rows = [row for row in made_by(workflow) if row.reward is not None]
    found = found_by(algorithm, rows)
    assert found == pytest.approx(FORMULAS[algorithm](rows), abs=1e-9)
    assert len({round(value, 6) for value in found.values()}) > 1


@pytest.mark.parametrize("workflow", STEPS)
@pytest.mark.parametrize(
    ("algorithm", "formula"), [("gigpo", gigpo), ("multi_step_grpo", multi_step)]
)
def test_steps_have_the_credit_of_what_the_environment_gave_by_every_rule(
    algorithm: str, formula: Callable[[Any], Credit], workflow: str
) -> None:
    rows = made_by(workflow)
    found = found_by(algorithm, rows)
    assert found == pytest.approx(formula(groups_of(rows, workflow)), abs=1e-9)
    assert len({round(value, 6) for value in found.values()}) > 1


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize(("algorithm", "lam"), [("ppo", 0.95), ("reinforce_plus_plus", 1.0)])
def test_tokens_have_the_whitened_return_of_their_row(
    algorithm: str, lam: float, workflow: str
) -> None:
    """With a critic that expects nothing: lam to the number of later tokens, times the reward."""
    rows = [row for row in made_by(workflow) if row.reward is not None]
    frame = credited(algorithm, rows).with_columns(weight=pl.lit(1.0))
    made = examples(frame)
    nothing = made.tokens["mask"] * 0.0
    prepared = resolve(algorithm).prepare(
        made.with_tokens(old_values=nothing, proximal=made.tokens["logprobs"])
    )
    mask = made.tokens["mask"].numpy() > 0
    returns = []
    for row, trained in zip(rows, np.split(mask, made.lengths.cumsum(0)[:-1].numpy()), strict=True):
        later = np.arange(trained.sum())[::-1]
        returns.append(float(row.reward or 0.0) * lam**later)
    values = np.concatenate(returns)
    expected = (values - values.mean()) / (values.std(ddof=0) + 1e-8)
    np.testing.assert_allclose(prepared.tokens["advantage"].numpy()[mask], expected, atol=1e-5)
    assert not prepared.tokens["advantage"].numpy()[~mask].any()


def test_a_run_credits_steps_with_rewards_of_their_own(store: Store) -> None:
    steps = {"step_wise": {**WALK, "rewards": "own"}}
    settings = {"workflow": steps, "rewards": {}, "sampling": {"max_tokens": 2}}
    run(
        store,
        config(
            algorithm={"gigpo": {"group_size": 5}},
            explorer=settings,
            trainer={"steps": 1},
            model={"from_scratch": {"alphabet": "at 0123456789+=-?"}},
        ),
    )
    drawn = table(store, "draws_current", "experience_id, advantage")
    rows = [
        Experience.from_row(row)
        for row in store.sql("SELECT * FROM experiences ORDER BY experience_id").pl().to_dicts()
    ]
    found: Credit = dict(drawn.iter_rows())
    mine = [row for row in rows if row.experience_id in found]
    assert found == pytest.approx(gigpo(groups_of(mine, "step_wise-own")), abs=1e-9)
    assert any(found.values())


def of_rewards(*rewards: float) -> list[Experience]:
    """A group with rewards, in this order."""
    return [
        replace(one, experience_id=f"g/{i:02d}", group_id="g", rollout_index=i, reward=reward)
        for i, reward in enumerate(rewards)
        for one in made_by("single_turn")[:1]
    ]


def test_deviations_from_peers_are_as_the_algorithms_files_say() -> None:
    standard: Any = {"rec": {"normalize": "std"}}
    for n, share in ((2, 0.707), (8, 0.935)):
        rewards = [1.0, 0.0] * (n // 2)
        found = list(found_by(standard, of_rewards(*rewards)).values())
        with_n = (np.array(rewards) - 0.5) / 0.5
        assert found == pytest.approx(with_n * np.sqrt((n - 1) / n), rel=1e-5)
        assert np.sqrt((n - 1) / n) == pytest.approx(share, abs=5e-4)
    alone: list[Any] = ["rec", "rloo", "opmd", {"opmd": {"baseline": "log_mean_exp"}}]
    assert [list(found_by(one, of_rewards(0.75)).values()) for one in alone] == [[0.0]] * 4
    values = torch.linspace(-1, 2, 1000, dtype=torch.float64)
    ratio = whitened(values, torch.ones(1000)) / (
        (values - values.mean()) / (values.var(correction=1) + 1e-8).sqrt()
    )
    torch.testing.assert_close(ratio, torch.full_like(ratio, 1.0005), rtol=1e-5, atol=0)
