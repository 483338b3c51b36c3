"""New rows made of old ones: what they say, what they keep, and which tokens are still true."""

import asyncio
import json
from typing import Any

import polars as pl
import pytest
from support.builders import experiences, line_of, rows, task

from rlake.operators import (
    OperatorFunction,
    expert_answers,
    good_prefix,
    hindsight,
    mix_tasksets,
    paraphrase,
    retry_tasks,
)
from rlake.operators.derived_rows import retold
from rlake.operators.paraphrases import echo
from rlake.pipelines import Pipeline, Sql, Table
from rlake.store import Experience, Store, Task

ECHO = "rlake.operators.paraphrases:echo"
TOKENS = ("token_ids", "loss_mask", "logprobs", "teacher_logprobs", "token_rewards", "segments")


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def made_of(before: pl.DataFrame, after: pl.DataFrame) -> list[dict[str, Any]]:
    return after.tail(after.height - before.height).to_dicts()


def tries(n: int = 1, **columns: Any) -> pl.DataFrame:
    """Return rows with tokens, as a policy's."""
    values: dict[str, Any] = {
        "prompt_text": "2+2=",
        "token_ids": [1, 2, 3],
        "loss_mask": [False, True, True],
        "logprobs": [0.0, -1.0, -2.0],
        "prompt_length": 1,
        "policy_version": 3,
        "segments": [{"policy_version": 3, "num_tokens": 2}],
        "advantage": 0.5,
        "run_id": "r",
        "batch": 1,
    }
    return rows(experiences(n, reward=0.0, **(values | columns)))


GOAL = {"desired_goal": [3, 4], "achieved_goal": [1, 2]}
ROOM = Task.ask("Walk to [3, 4].", metadata={"desired_goal": [3, 4]})


def test_hindsight_makes_the_goal_that_was_reached_the_goal() -> None:
    frame = tries(
        prompt_text="Walk to [3, 4].", response_text="left, up", metadata=GOAL, task_id=ROOM.task_id
    )
    [new] = made_of(frame, hindsight()(frame))
    assert (new["prompt_text"], new["response_text"]) == ("Walk to [1, 2].", "left, up")
    assert json.loads(new["messages"]) == [
        say("user", "Walk to [1, 2]."),
        say("assistant", "left, up"),
    ]
    assert (new["reward"], new["source"], new["advantage"]) == (1.0, "synthetic", None)
    assert json.loads(new["metadata"]) == {"desired_goal": [1, 2], "achieved_goal": [1, 2]}
    assert [new[name] for name in TOKENS] == [None] * len(TOKENS)
    assert new["task_id"] not in frame["task_id"].to_list()
    assert made_of(frame, hindsight(reward=0.5)(frame))[0]["reward"] == 0.5


@pytest.mark.parametrize(
    "columns",
    [
        {"metadata": GOAL | {"achieved_goal": [3, 4]}, "prompt_text": "Walk to [3, 4]."},
        {"metadata": GOAL, "prompt_text": "Walk."},
        {"metadata": GOAL, "prompt_text": "Walk to [3, 4].", "response_text": "to [3, 4]: up"},
        {"metadata": {"achieved_goal": 1}, "prompt_text": "Walk to 1."},
        {"metadata": None, "prompt_text": "Walk to [3, 4]."},
        {"metadata": GOAL, "prompt_text": None},
    ],
    ids=["reached", "goal not told", "reply names it", "no goal", "no metadata", "no text"],
)
def test_hindsight_leaves_alone_what_would_not_be_true(columns: dict[str, Any]) -> None:
    values: dict[str, Any] = {"response_text": "up"} | columns
    frame = tries(**values)
    assert hindsight()(frame).equals(frame.with_columns())


def doubled(task: Task, experience: Experience) -> Task | None:
    """Ask for what was said: a relabeling of our own."""
    said = experience.response_text or ""
    if said == "broken":
        raise ValueError("cannot be read")
    return Task.ask(f"Say {said}", said, taskset="said") if said != "nothing" else None


def test_hindsight_by_a_function_of_ones_own_fails_by_row() -> None:
    frame = tries(3).with_columns(response_text=pl.Series(["a", "broken", "nothing"]))
    applied = hindsight(relabel=doubled).apply(frame)
    [new] = made_of(frame, applied.rows)
    where = line_of(__file__, "cannot be read")
    assert (new["parent_id"], new["prompt_text"]) == ("g000/00", "Say a")
    assert new["task_id"] == Task.ask("Say a", "a", taskset="said").task_id
    assert applied.failed.rows() == [("g000/01", f"ValueError: cannot be read {where}")]


TALK = [
    say("user", "go"),
    say("assistant", "look"),
    say("tool", "a door"),
    say("assistant", "open"),
    say("tool", "Error: it is locked"),
    say("assistant", "give up"),
]
MASK = [0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1]


def walked(talk: list[dict[str, str]] = TALK, **columns: Any) -> pl.DataFrame:
    values: dict[str, Any] = {
        "messages": talk,
        "token_ids": list(range(11)),
        "loss_mask": [bool(m) for m in MASK],
        "logprobs": [-0.5 * m for m in MASK],
        "prompt_length": 2,
        "num_turns": 3,
        "segments": [
            {"policy_version": 3, "num_tokens": 1},
            {"policy_version": 4, "num_tokens": 5},
        ],
    }
    return tries(**(values | columns))


def test_the_good_prefix_ends_before_the_failed_step_with_the_tokens_as_sampled() -> None:
    frame = walked()
    [new] = made_of(frame, good_prefix()(frame))
    assert json.loads(new["messages"]) == TALK[:2]
    assert (new["response_text"], new["num_turns"], new["reward"]) == ("look", 1, None)
    assert new["token_ids"] == [0, 1, 2, 3]
    assert new["loss_mask"] == [False, False, True, True]
    assert new["logprobs"] == [0.0, 0.0, -0.5, -0.5]
    assert (new["num_tokens"], new["prompt_length"], new["policy_version"]) == (4, 2, 3)
    assert new["segments"] == [
        {"policy_version": 3, "num_tokens": 1},
        {"policy_version": 4, "num_tokens": 1},
    ]
    assert new["advantage"] is None


def test_a_later_failure_keeps_more_and_a_pattern_says_what_failing_is() -> None:
    frame = walked([*TALK[:4], say("tool", "it opens"), TALK[5], say("tool", "Too late")])
    assert made_of(frame, good_prefix()(frame)) == []
    [new] = made_of(frame, good_prefix(failed="^Too late")(frame))
    assert json.loads(new["messages"]) == TALK[:4]
    assert new["token_ids"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert sum(s["num_tokens"] for s in new["segments"]) == sum(MASK[:8])


def test_replies_that_the_task_began_with_are_not_counted_as_sampled() -> None:
    shown = [say("user", "go"), say("assistant", "an example")]
    frame = walked([*shown, *TALK], num_turns=3)
    [new] = made_of(frame, good_prefix()(frame))
    assert new["token_ids"] == [0, 1, 2, 3]
    unknown = walked([*shown, *TALK], num_turns=None)
    [new] = made_of(unknown, good_prefix()(unknown))
    assert [new[name] for name in TOKENS] == [None] * len(TOKENS)


def test_a_try_that_fails_at_once_has_no_good_prefix() -> None:
    frame = walked([say("user", "go"), say("assistant", "fly"), say("tool", "error")])
    assert good_prefix()(frame).height == 1


def test_failed_tries_become_tasks_that_say_what_was_wrong(store: Store) -> None:
    store.append("tasks", [task(0)])
    tried = rows(experiences(4, reward=(1.0, 0.0, None, 0.0))).with_columns(
        prompt_text=pl.lit("0+0="), response_text=pl.format("{}", "rollout_index")
    )
    store.append("experiences", tried)
    chain = Pipeline(
        name="again",
        source=Sql(
            "SELECT e.*, t.answer, 'not ' || e.response_text AS told FROM experiences e "
            "JOIN tasks t USING (task_id)"
        ),
        operators=[retry_tasks(feedback="told", prompt="Wrong.{feedback} Again.")],
        sink=Table("tasks"),
    )
    report = chain.run(store)
    assert {(d.reason, d.rows) for d in report.dropped} == {
        ("its reward is above 0", 1),
        ("its reward is NULL", 1),
    }
    found = store.sql(
        "SELECT messages, answer, taskset, metadata FROM tasks WHERE taskset = 'retry' ORDER BY 1"
    ).fetchall()
    assert [json.loads(m) for m, *_ in found] == [
        [say("user", "0+0="), say("assistant", n), say("user", f"Wrong. not {n} Again.")]
        for n in ("1", "3")
    ]
    assert {(a, s) for _, a, s, _ in found} == {("0", "retry")}
    assert [json.loads(m) for *_, m in found] == [
        {"parent_id": f"g000/0{n}", "task_id": task(0).task_id} for n in (1, 3)
    ]
    chain.run(store)
    assert store.count("tasks") == 3


def test_a_task_may_begin_at_the_failed_step() -> None:
    frame = walked().with_columns(answer=pl.lit("out"))
    op = retry_tasks(start="failed_step")
    [made] = op(frame).to_dicts()
    assert json.loads(made["messages"]) == TALK[:3]
    fine = walked([say("user", "go"), say("assistant", "x")]).with_columns(answer=pl.lit("out"))
    assert op.apply(fine).dropped["reason"].to_list() == ["no failed step is found in it"]


def test_a_paraphrase_is_another_question_without_tokens_or_a_verdict() -> None:
    frame = tries(2, response_text="4").with_columns(reward=pl.lit(1.0))
    op = paraphrase(policy=ECHO, prompt="How much is {text}")
    new, _ = made_of(frame, op(frame))
    assert (new["prompt_text"], new["response_text"]) == ("How much is 2+2=", "4")
    assert (new["reward"], new["source"], new["policy_version"]) == (None, "synthetic", None)
    assert [new[name] for name in TOKENS] == [None] * len(TOKENS)
    assert new["task_id"] not in frame["task_id"].to_list()
    other = paraphrase(policy=ECHO, what="reply", prompt="it is {text}")
    new, _ = made_of(frame, other(frame))
    assert (new["prompt_text"], new["response_text"]) == ("2+2=", "it is 4")
    assert new["task_id"] == frame["task_id"][0]
    same = paraphrase(policy=ECHO, prompt="{text}")
    assert same(frame).height == frame.height


def test_a_paraphrased_task_is_a_task_with_the_same_answer(store: Store) -> None:
    store.append("tasks", [task(1), task(2)])
    chain = Pipeline(
        name="reworded",
        source=Table("tasks", where="metadata IS NULL"),
        operators=[paraphrase(policy=ECHO, prompt="How much is {text}")],
        sink=Table("tasks"),
    )
    assert chain.run(store).rows_out == 2
    made = store.sql(
        "SELECT prompt_text, answer, metadata FROM tasks ORDER BY answer, 1"
    ).fetchall()
    assert [(p, a) for p, a, _ in made] == [
        ("1+1=", "2"),
        ("How much is 1+1=", "2"),
        ("2+2=", "4"),
        ("How much is 2+2=", "4"),
    ]
    assert json.loads(made[1][2]) == {"paraphrase_of": task(1).task_id}
    assert chain.run(store, full=True).rows_out == 0


def test_a_policy_that_fails_on_a_row_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def moody(messages: list[dict[str, Any]]) -> str:
        await asyncio.sleep(0)
        if "1" in messages[-1]["content"]:
            raise ConnectionError("gone")
        return await echo(messages)

    monkeypatch.setattr("rlake.operators.paraphrases.echo", moody)
    frame = tries(3).with_columns(prompt_text=pl.format("ask {}", "rollout_index"))
    applied = paraphrase(policy=ECHO, prompt="{text}?").apply(frame)
    gone = f"ConnectionError: gone {line_of(__file__, 'gone')}"
    assert applied.failed.rows() == [("g000/01", gone)]
    assert applied.rows["parent_id"].drop_nulls().to_list() == ["g000/00", "g000/02"]


def shown(*rewards: float | None, size: int = 2) -> pl.DataFrame:
    made = experiences(len(rewards), reward=rewards, group_size=size, token_ids=[1])
    return rows(made).with_columns(prompt_text=pl.lit("q"), answer=pl.lit("because. #### 4"))


def test_experts_show_what_nobody_found_out() -> None:
    frame = shown(0.0, 0.0, 1.0, 0.0, None, None)
    [new] = made_of(frame, expert_answers()(frame))
    assert (new["parent_id"], new["source"], new["reward"]) == ("g000/00", "expert", 1.0)
    assert json.loads(new["messages"])[-1] == say("assistant", "because. #### 4")
    assert (new["token_ids"], new["policy_version"]) == (None, None)
    assert new["task_id"] == frame["task_id"][0]
    every = expert_answers(solved_above=None)(frame)
    assert every["parent_id"].drop_nulls().to_list() == ["g000/00", "g001/00", "g002/00"]
    assert expert_answers()(expert_answers()(frame)).height == frame.height + 1
    without = frame.with_columns(answer=pl.lit(None, pl.String))
    assert expert_answers()(without).equals(without)


def test_a_share_of_the_groups_is_shown_the_same_whatever_their_order() -> None:
    frame = shown(*[0.0] * 400, size=1)
    op = expert_answers(share=0.25, seed=1)
    parents = set(op(frame)["parent_id"].drop_nulls())
    assert 70 <= len(parents) <= 130  # 100, give or take 3.5 standard deviations
    mixed = frame.sample(fraction=1.0, shuffle=True, seed=0)
    assert set(op(mixed)["parent_id"].drop_nulls()) == parents
    both = mix_tasksets(shares={"expert": 1, "explorer": 2}, by="source")(op(frame))
    counts = dict(both.group_by("source").len().iter_rows())
    assert counts["explorer"] == 2 * counts["expert"]


@pytest.mark.parametrize("function", [hindsight, good_prefix, expert_answers, paraphrase])
def test_no_row_of_other_words_keeps_what_was_true_of_the_old_ones(
    function: OperatorFunction[...],
) -> None:
    policy = {"policy": ECHO} if function is paraphrase else {}
    frame = walked(metadata={"desired_goal": "go", "achieved_goal": "stay"}, finish_reason="stop")
    frame = frame.with_columns(answer=pl.lit("out"), priority=pl.lit(2.0))
    [new] = made_of(frame, function(**policy)(frame))
    gone = ("advantage", "priority", "rewards", "run_id", "batch", "drop_reason", "finish_reason")
    assert [new[name] for name in gone] == [None] * len(gone)
    old, kept = frame["token_ids"][0], new["token_ids"]
    assert kept is None or list(kept) == list(old)[: len(kept)]


def test_words_that_are_not_text_are_no_response_text() -> None:
    parts = [say("user", "q"), {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
    assert retold(parts, source="expert", reward=None)["response_text"] is None
