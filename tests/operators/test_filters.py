"""What filters keep, and the reason and number that each dropped row is given."""

import polars as pl
from support.builders import RIGHT_AND_WRONG, experiences, rows

from rlake.operators import (
    Operator,
    dapo_dynamic_sampling,
    drop_failed,
    drop_truncated,
    drop_unscored,
    failure_kind,
    keep_length_between,
    keep_reward_between,
    sample,
    top_k,
)

NAN, INF = float("nan"), float("inf")


def told(op: Operator, frame: pl.DataFrame) -> list[str | None]:
    """Return the reason of each row, None where it stays."""
    dropped = dict(op.apply(frame).dropped.iter_rows())
    return [dropped.get(i) for i in frame["experience_id"]]


def test_a_range_of_rewards_includes_its_ends_and_no_reward_lies_in_it() -> None:
    frame = rows(experiences(6, reward=(0.0, 0.25, 1.0, 1.5, None, 0.5))).with_columns(
        reward=pl.when(pl.col("reward") == 1.5).then(NAN).otherwise("reward")
    )
    both = keep_reward_between(low=0.25, high=0.5)
    assert told(both, frame) == [
        "reward 0.0 is below 0.25",
        None,
        "reward 1.0 is above 0.5",
        "reward is NaN",
        "reward is NULL",
        None,
    ]
    assert told(keep_reward_between(high=0.0), frame)[:2] == [None, "reward 0.25 is above 0"]
    assert keep_reward_between(low=-1.0)(frame).height == 4
    assert both.scope == "row"


def test_a_length_is_of_characters_of_all_tokens_or_of_those_that_were_sampled() -> None:
    one = experiences(1, token_ids=[1, 2, 3, 4], loss_mask=[False, True, True, False])
    frame = rows(one).with_columns(response_text=pl.lit("añb"))
    assert told(keep_length_between(low=4), frame) == ["length 3 in characters is below 4"]
    assert told(keep_length_between(high=3, of="tokens"), frame) == [
        "length 4 in tokens is above 3"
    ]
    sampled = keep_length_between(low=3, of="sampled_tokens")
    assert told(sampled, frame) == ["length 2 in sampled tokens is below 3"]
    assert told(keep_length_between(low=2, high=2, of="sampled_tokens"), frame) == [None]
    without = rows(experiences(1))
    assert told(sampled, without) == ["length is NULL"]


def test_rows_without_a_finite_reward_are_not_scored() -> None:
    frame = rows(experiences(4, reward=(0.0, None, 1.0, 2.0))).with_columns(
        reward=pl.col("reward").replace({1.0: NAN, 2.0: INF})
    )
    expected = [None, "reward is NULL", "reward is NaN", "reward is inf"]
    assert told(drop_unscored(), frame) == expected


def test_rows_that_were_cut_off_go_and_those_that_do_not_say_stay() -> None:
    ends = ["stop", "length", None, "max_turns"]
    frame = rows(experiences(4)).with_columns(finish_reason=pl.Series(ends))
    assert told(drop_truncated(), frame) == [
        None,
        "it was cut off: finish_reason is length",
        None,
        None,
    ]
    reason = "it was cut off: finish_reason is max_turns"
    assert told(drop_truncated(finish_reasons=["max_turns"]), frame) == [None, None, None, reason]


FAILURES = [
    ("stop", None, None),
    (None, None, None),
    ("length", None, None),
    ("tool_calls", None, None),
    ("error", "workflow failed: it took longer than 30 s", "timeout"),
    ("error", "workflow failed: TimeoutError", "timeout"),
    ("timeout", None, "timeout"),
    ("error", "the tool `search` failed: 503", "tool_error"),
    ("tool_error", None, "tool_error"),
    ("error", "tool `search` timed out", "timeout"),
    ("context_length_exceeded", None, "out_of_context"),
    ("error", "This model's maximum context length is 4096 tokens", "out_of_context"),
    ("error", "workflow failed: JobError: the sandbox broke: killed", "sandbox"),
    ("stop", "the sandbox timed out", "sandbox"),
    ("error", "workflow failed: KeyError: 'x'", "other"),
    ("error", None, "other"),
    ("stop", "reward `x` failed: ValueError", "other"),
    ("tool_calls", "reward `x` failed: ValueError", "other"),
    ("content_filter", None, None),
]


def test_each_kind_of_failure_has_its_name_and_can_be_dropped_alone() -> None:
    frame = rows(experiences(len(FAILURES), group_size=50)).with_columns(
        finish_reason=pl.Series([f for f, _, _ in FAILURES], dtype=pl.String),
        drop_reason=pl.Series([d for _, d, _ in FAILURES], dtype=pl.String),
    )
    kinds = [kind for _, _, kind in FAILURES]
    assert failure_kind()(frame)["failure"].to_list() == kinds
    for chosen in ("timeout", "tool_error", "out_of_context", "sandbox", "other"):
        expected = [f"{k}: {d or f}" if k == chosen else None for f, d, k in FAILURES]
        assert told(drop_failed(kinds=[chosen]), frame) == expected
    assert told(drop_failed(), frame) == [k and f"{k}: {d or f}" for f, d, k in FAILURES]
    assert drop_failed().scope == "row"


def _judged(*groups: tuple[list[float | None], list[float | None]]) -> pl.DataFrame:
    """Groups of shaped rewards, each with the accuracy of its rows."""
    frames: list[pl.DataFrame] = []
    for number, (rewards, accuracies) in enumerate(groups):
        made = experiences(len(rewards), reward=rewards, group_id=f"h{number}", group_size=99)
        lists = [
            [{"name": "format", "value": 1.0}]
            + ([] if a is None else [{"name": "accuracy", "value": a}])
            for a in accuracies
        ]
        frames.append(
            rows(made).with_columns(
                experience_id=pl.format("{}/{}", "group_id", "rollout_index"),
                rewards=pl.Series(lists, dtype=rows(made).schema["rewards"]),
            )
        )
    return pl.concat(frames)


def test_dynamic_sampling_judges_groups_by_accuracy_and_not_by_the_shaped_reward() -> None:
    frame = _judged(
        ([1.1, 0.9], [1.0, 1.0]),  # all right, though the rewards differ
        ([1.0, 1.0], [1.0, 0.0]),  # one is right, though the rewards do not differ
        ([0.3, 0.1], [0.0, 0.0]),
        ([1.0, 0.0], [None, None]),  # no accuracy: the reward
        ([1.0, 0.0, 0.9], [1.0, None, None]),  # one accuracy: the reward does not stand for others
        ([1.0, None], [None, None]),
        ([1.0, 0.0, 0.5], [1.0, None, 0.0]),
    )
    op = dapo_dynamic_sampling()
    reasons = [r for i, r in zip(frame["rollout_index"], told(op, frame), strict=True) if i == 0]
    assert reasons == [
        "2 of 2 answers of its group are right",
        None,
        "0 of 2 answers of its group are right",
        None,
        "1 of its group have an accuracy, expected two at least",
        "1 of its group have an accuracy, expected two at least",
        None,
    ]
    assert (op.scope, op.whole_groups) == ("group", True)
    by_reward = dapo_dynamic_sampling(column="reward", threshold=0.95)
    kept = frame.pipe(by_reward)["group_id"].unique(maintain_order=True).to_list()
    assert kept == ["h0", "h3", "h4", "h6"]


def test_dynamic_sampling_reads_the_accuracy_of_metrics_where_rewards_have_none() -> None:
    made = rows(experiences(4, reward=1.0))
    measured = [[{"name": "accuracy", "value": v}] for v in RIGHT_AND_WRONG]
    frame = made.with_columns(metrics=pl.Series(measured, dtype=made.schema["metrics"]))
    assert told(dapo_dynamic_sampling(), frame) == [None] * 4
    assert (
        told(dapo_dynamic_sampling(accuracy="exact"), frame)
        == ["4 of 4 answers of its group are right"] * 4
    )


def test_the_best_of_a_group_a_task_or_all_stay_with_the_first_id_of_equal_ones() -> None:
    frame = rows(experiences(8, reward=(0.5, 1.0, 1.0, None, 0.2, 7.0, 0.1, 0.2)))
    frame = frame[[7, 0, 4, 2, 5, 1, 3, 6]].with_columns(pl.col("reward").replace(7.0, NAN))
    assert frame.pipe(top_k())["experience_id"].to_list() == ["g001/00", "g000/01"]
    two = frame.pipe(top_k(k=2, within="task"))["experience_id"].to_list()
    assert two == ["g001/03", "g001/00", "g000/02", "g000/01"]
    least = top_k(by="reward", ascending=True, within="all")
    assert frame.pipe(least)["experience_id"].to_list() == ["g001/02"]
    reasons = dict(top_k().apply(frame).dropped.iter_rows())
    assert reasons["g000/02"] == "rank 2 of 3 by reward in its group; the first 1 are kept"
    assert reasons["g000/03"] == "its reward is NULL"
    assert reasons["g001/01"] == "its reward is not finite"
    assert (top_k().scope, least.scope, top_k(within="task").scope) == ("group", "all", "all")


def test_the_best_k_count_each_reply_once_by_any_column() -> None:
    frame = rows(experiences(4, reward=1.0)).with_columns(
        response_text=pl.Series(["4", "4", "four", "IV"]), priority=pl.Series([0.3, 0.2, 0.1, 0.4])
    )
    few = top_k(k=2, by="priority", ascending=True, min_value=0.15, distinct_by="response_text")
    applied = few.apply(frame)
    assert applied.rows["experience_id"].to_list() == ["g000/01", "g000/03"]
    assert dict(applied.dropped.iter_rows()) == {
        "g000/00": "an equal reply of its group counts",
        "g000/02": "its priority is below 0.15",
    }


def test_a_sample_is_its_share_and_a_smaller_one_is_part_of_a_larger() -> None:
    frame = rows(experiences(4000))
    kept = {
        share: set(frame.pipe(sample(share=share))["experience_id"]) for share in (0.0, 0.1, 0.5, 1)
    }
    assert kept[0.0] < kept[0.1] < kept[0.5] < kept[1]
    assert len(kept[1]) == 4000
    # five standard deviations of a binomial
    assert abs(len(kept[0.5]) - 2000) < 5 * (4000 * 0.25) ** 0.5
    other = set(frame.pipe(sample(share=0.5, seed=1))["experience_id"])
    assert abs(len(other & kept[0.5]) - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5
    assert sample(share=0.5).scope == "row"
