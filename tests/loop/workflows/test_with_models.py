"""Workflows that ask models: reflect and retry, self-judging, simulated users, teachers."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.builders import task
from support.rollouts import rollouts, script
from support.tiny_models import SPEC, config, speaking, table, tiny

from rlake.loop.config import OtherModel, TinyModel
from rlake.loop.inference.build import start_auxiliary
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Policy, Sampling
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.loop.models.token_logprobs import token_logprobs
from rlake.loop.run import check, run
from rlake.loop.weight_sync.run_models import resolve_run_models
from rlake.store import Experience, Store, Task
from rlake.store.errors import ConfigError
from rlake.store.records import Message


def tried(
    policy: Policy,
    workflow: str,
    *,
    given: dict[str, Any] | None = None,
    asked: Task | None = None,
    **spec: Any,
) -> list[Experience]:
    """Try one task by a workflow of ours."""
    return rollouts(policy, {workflow: given}, asked or task(2), rewards="exact_match", **spec)


def parts(rows: Sequence[Experience]) -> list[str]:
    return [(row.metadata or {})["part"] for row in rows]


def sampled(row: Experience) -> str:
    """What the mask says that the policy wrote, as the scripted policy's tokens are characters."""
    assert row.token_ids is not None
    assert row.loss_mask is not None
    pairs = zip(row.token_ids, row.loss_mask, strict=True)
    return "".join(chr(t) for t, is_sampled in pairs if is_sampled).rstrip("\0")


def test_a_retry_is_learned_behind_the_tasks_own_prompt_with_what_it_was_sampled_with() -> None:
    policy, asked = script("5", "Count on.", "4", version=7)
    rows = tried(policy, "reflect_and_retry")
    assert parts(rows) == ["first", "reflection", "retry"]
    assert [row.reward for row in rows] == [0.0, 1.0, 1.0]
    assert [sampled(row) for row in rows] == ["5", "Count on.", "4"]
    assert "Count on." in asked[2][-1]["content"]
    first, reflection, retry = rows
    assert first.prompt_length == retry.prompt_length == len("2+2=")
    assert retry.messages == [*task(2).messages, {"role": "assistant", "content": "4"}]
    assert retry.logprobs == [0.0] * 4 + [-0.5] * 2
    assert retry.metrics["is_guided"] == 1
    group = "demo/000001/0000"
    assert [row.group_id for row in rows] == [group, f"{group}/reflections", group]
    assert [row.experience_id for row in rows] == [f"{group}/00{x}" for x in ("", ".1", ".2")]
    assert first.task_id == retry.task_id != reflection.task_id


def test_with_its_hint_kept_a_retry_stands_behind_what_was_asked() -> None:
    rows = tried(ScriptedPolicy(["5", "Hm.", "6"]), "reflect_and_retry", given={"keep_hint": True})
    assert rows[2].messages is not None
    assert "Hm." in rows[2].messages[0]["content"]
    assert [row.reward for row in rows] == [0.0, 0.0, 0.0]


def test_what_is_right_at_once_is_not_tried_again() -> None:
    rows = tried(ScriptedPolicy(["4"]), "reflect_and_retry", group_size=2)
    assert parts(rows) == ["first", "first"]


def test_a_hint_goes_into_the_last_thing_that_the_user_said() -> None:
    policy, asked = script("no", "no", "no")
    system = Task(messages=[{"role": "system", "content": "Add."}, *task(2).messages], answer="4")
    tried(policy, "reflect_and_retry", asked=system, given={"hint": "{reflection}!"})
    assert asked[2] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "no!"}]


def judging(scores: Sequence[float] | str) -> ScriptedPolicy:
    """A policy that answers 4, 5, 4, 5 ... and judges all alike."""
    said = scores if isinstance(scores, str) else json.dumps({"scores": list(scores)})
    count = iter(range(100))

    def answers(messages: Sequence[Message], i: int) -> str:
        return said if "<attempt" in messages[0]["content"] else "45"[next(count) % 2]

    return ScriptedPolicy(answers, version=3)


def test_with_the_truth_each_try_judges_its_group_and_is_rewarded_for_how_near_it_came() -> None:
    rows = tried(judging([0.75, 0.0]), "self_judging", given={"truth": 1.0}, group_size=2)
    assert parts(rows) == ["answer", "answer", "judge", "judge"]
    assert [row.reward for row in rows] == [1.0, 0.0, 0.875, 0.875]
    assert [row.rollout_index for row in rows] == [0, 1, 0, 1]
    assert [row.group_id for row in rows[1:3]] == ["demo/000001/0000", "demo/000001/0000/judges"]
    assert len({row.experience_id for row in rows}) == 4
    assert {row.task_id for row in rows[:2]}.isdisjoint(row.task_id for row in rows[2:])
    assert sampled(rows[2]) == '{"scores": [0.75, 0.0]}'


def test_without_the_truth_the_policys_scores_are_the_rewards() -> None:
    rows = tried(judging([0.75, 0.5]), "self_judging", given={"truth": 0.0}, group_size=2)
    assert [row.reward for row in rows] == [0.75, 0.5, None]
    assert rows[0].rewards == {"self_judged": 0.75}
    assert rows[2].drop_reason == "a judgement without the truth to learn from"


@pytest.mark.parametrize("said", ["I like them all.", '{"scores": [1.0]}', '{"scores": [1, 7]}'])
def test_a_judgement_that_cannot_be_read_costs_the_judge_and_rewards_nobody(said: str) -> None:
    told = tried(judging(said), "self_judging", given={"truth": 1.0}, group_size=2)
    assert [row.reward for row in told] == [1.0, 0.0, 0.0, 0.0]
    blind = tried(judging(said), "self_judging", given={"truth": 0.0}, group_size=2)
    assert [row.reward for row in blind] == [None] * 3
    assert all(row.drop_reason for row in blind)


def test_a_group_made_by_one_workflow_has_its_greedy_tries_behind_the_others() -> None:
    given = {"truth": 0.0}
    rows = tried(judging([1, 0, 1]), "self_judging", given=given, group_size=2, greedy_rollouts=1)
    greedy = [row for row in rows if "is_greedy" in row.metrics]
    assert [row.rollout_index for row in greedy] == [2]


def test_a_group_whose_workflow_fails_keeps_what_was_sampled() -> None:
    def answers(messages: Sequence[Message], i: int) -> str:
        if "<attempt" in messages[0]["content"]:
            raise OSError("no judge today")
        return "4"

    rows = tried(ScriptedPolicy(answers), "self_judging", group_size=2)
    assert [sampled(row) for row in rows] == ["4", "4"]
    assert all("no judge today" in str(row.drop_reason) for row in rows)


PERSON = Task(
    messages=[{"role": "system", "content": "You book trains."}],
    metadata={"persona": "a hurried doctor", "goal": "a seat to Bern"},
)


def test_a_simulated_user_talks_until_it_is_done_and_is_not_trained_on() -> None:
    user, heard = script("To Bern.", "At noon.", "Thanks. [DONE]")
    policy = ScriptedPolicy(["When?", "Booked."])
    [row] = tried(policy, "user_simulator", models={"user": user}, asked=PERSON)
    assert sampled(row) == "When?\0Booked."
    assert row.num_turns == 2
    assert row.metrics == {"user/done": 1.0, "user/turns": 2.0}
    assert [m["role"] for m in heard[2]] == ["system", "user", *["assistant", "user"] * 2]
    assert "a hurried doctor" in heard[0][0]["content"]
    assert "a seat to Bern" in heard[0][0]["content"]
    assert row.messages is not None
    assert [m["content"] for m in row.messages[1:]] == ["To Bern.", "When?", "At noon.", "Booked."]


@pytest.mark.parametrize("workflow", ["user_simulator", "tool_agent_user"])
def test_users_of_a_group_differ_and_a_rollout_made_again_hears_the_same(workflow: str) -> None:
    heard = [heard_from_users(workflow, seed) for seed in (0, 0, 1)]
    assert len(set(heard[0])) == len(heard[0]) == 4
    assert heard[0] == heard[1]
    assert not set(heard[0]) & set(heard[2])


def heard_from_users(workflow: str, seed: int) -> list[tuple[str, ...]]:
    """What the users of four rollouts say, played by a real model that samples."""
    given: dict[str, Any] = {"max_turns": 3}
    if workflow == "tool_agent_user":
        given["domain"] = "rlake.loop.recipes.toys:orders"
    user = speaking(max_length=1024, sampling=Sampling(temperature=1.0, max_tokens=12))
    asked = replace(PERSON, metadata={**(PERSON.metadata or {}), "actions": [], "outputs": []})
    how: dict[str, Any] = {"group_size": 4, "models": {"user": user}, "seed": seed}
    rows = rollouts(ScriptedPolicy(["Yes."]), {workflow: given}, asked, **how)
    assert [row.drop_reason for row in rows] == [None] * 4
    said = [[m for m in row.messages or () if m.get("role") == "user"] for row in rows]
    assert {len(one) for one in said} == {3}
    return [tuple(str(m["content"]) for m in one) for one in said]


def test_a_user_who_is_never_done_is_left_after_so_many_turns() -> None:
    opened = Task.ask("Hello", metadata={"goal": "to talk"})
    how: Any = {"given": {"max_turns": 3}, "models": {"user": ScriptedPolicy(["And?"])}}
    [row] = tried(ScriptedPolicy(["Yes."]), "user_simulator", asked=opened, **how)
    assert (row.num_turns, row.metrics["user/done"]) == (3, 0.0)


def test_a_workflow_without_the_model_that_it_asks_is_refused() -> None:
    told = "the workflow `user_simulator` needs `user`"
    with pytest.raises(ConfigError, match=told):
        check(config(explorer={"workflow": "user_simulator"}))


def test_a_teacher_scores_the_tokens_that_were_sampled_at_their_temperature() -> None:
    model, tokenizer = tiny(seed=5)
    teacher = ChatPolicy(TransformersEngine(model, tokenizer))
    rows = tried(speaking(), "on_policy_distillation", models={"teacher": teacher}, group_size=3)
    for row in rows:
        assert row.teacher_logprobs is not None
        assert row.token_ids is not None
        expected = token_logprobs(model, torch.tensor([row.token_ids]))[0].tolist()
        assert row.teacher_logprobs[:4] == [0.0] * 4
        assert row.teacher_logprobs[4:] == pytest.approx(expected[4:], abs=1e-5)
        assert row.reward is not None
    shown = Task(messages=[{"role": "user", "content": [{"type": "image", "media_id": "5e0c"}]}])
    models = {"teacher": teacher}
    [row] = tried(speaking(), "on_policy_distillation", asked=shown, models=models)
    assert "shows images, expected text alone" in str(row.drop_reason)


def test_what_only_answers_cannot_be_a_teacher() -> None:
    [row] = tried(speaking(), "on_policy_distillation", models={"teacher": ScriptedPolicy(["4"])})
    assert "`explorer.auxiliary_models.teacher` only answers" in str(row.drop_reason)
    explorer = {
        "workflow": "on_policy_distillation",
        "auxiliary_models": {
            "teacher": {"endpoint": {"url": "http://127.0.0.1:9/v1", "model": "big"}}
        },
    }
    with pytest.raises(ConfigError, match=r"`explorer\.auxiliary_models\.teacher` is an endpoint"):
        check(config(algorithm="on_policy_distillation", explorer=explorer))


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        (
            {"from_scratch": SPEC, "engine": "vllm"},
            "vLLM and SGLang serve the model of a `path` or of a `run`",
        ),
        (
            {"path": "m", "engine": {"endpoint": {"url": "http://x", "model": "m"}}},
            "below `engine`",
        ),
    ],
)
def test_a_model_beside_the_policy_names_an_engine_that_can_hold_it(
    teacher: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        distilling(auxiliary_models={"teacher": teacher})


def test_a_teacher_on_vllm_scores_at_temperature_1_only() -> None:
    warm = {"temperature": 0.7, "max_tokens": 3}
    teacher = {"path": "some/model", "engine": "vllm"}
    with pytest.raises(ConfigError, match=r"at temperature 1, and .*temperature is 0\.7; set it"):
        check(distilling(auxiliary_models={"teacher": teacher}, sampling=warm))


def distilling(**changes: Any) -> Any:
    """A run that learns from another's weights, which score its tokens as they are sampled."""
    explorer = {
        "workflow": "on_policy_distillation",
        "auxiliary_models": {"teacher": {"from_scratch": SPEC}},
        "rewards": "support.tiny_models:share_of_ones",
        "sampling": {"max_tokens": 3},
    }
    return config(name="student", algorithm="on_policy_distillation", explorer=explorer | changes)


def test_the_trainer_needs_no_teacher_where_the_log_probs_are_stored(store: Store) -> None:
    run(store, distilling())
    told = table(store, "experiences", "teacher_logprobs, logprobs, drop_reason")
    assert told["drop_reason"].null_count() == told.height > 0
    assert (told["teacher_logprobs"].list.len() == told["logprobs"].list.len()).all()
    names = table(store, "metrics", "DISTINCT name")["name"].to_list()
    assert "train/teacher_kl" in names


def test_models_are_closed_with_the_policy_and_when_another_one_does_not_start(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[TransformersEngine] = []
    close = TransformersEngine.close

    async def noted(engine: TransformersEngine) -> None:
        closed.append(engine)
        await close(engine)

    monkeypatch.setattr(TransformersEngine, "close", noted)
    run(store, distilling())
    assert len(set(closed)) == len(closed) == 2, "the policy and its teacher"
    closed.clear()
    models = {
        "judge": OtherModel(from_scratch=TinyModel(**SPEC)),
        "user": OtherModel(path="./nowhere"),
    }
    with pytest.raises(ConfigError, match="loaded: no such folder"):
        start_auxiliary(models, seed=0)
    assert len(closed) == 1


def test_another_model_may_be_another_runs_weights(store: Store) -> None:
    run(store, config())
    settings = resolve_run_models(
        store, distilling(auxiliary_models={"teacher": {"run": "demo", "version": 2}})
    )
    assert settings.explorer is not None
    place = settings.explorer.auxiliary_models["teacher"].path
    assert place is not None
    assert place.endswith("v000002")
    teacher = start_auxiliary(settings.explorer.auxiliary_models, seed=0)["teacher"]
    assert isinstance(teacher, ChatPolicy)
    asked = asyncio.run(teacher.score([5, 13], [4, 4]))
    assert len(asked) == 2
    assert all(x < 0 for x in asked)
