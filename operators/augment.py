"""Augmentation: new rows derived from existing ones."""

import polars as pl

from . import derived_rows
from .body import FrameFunction
from .decorator import operator
from .parameters import Share
from .statistics import seeded_uniform


@operator("augment", reads=("experience_id", "group_id", "reward"), reads_all=True, scope="group")
def copy_best(*, min_reward: float | None = None) -> FrameFunction:
    """Add a copy of each group's best row, as `synthetic` experience to imitate.

    The copy has the best row as its parent, keeps its tokens and reward, and has its own group and
    no run, so that statistics of stored groups and the rows of runs do not change. Rows whose
    source is `synthetic` are not copied. Groups without a reward (or, with `min_reward`, without
    one that high) give none; among equal rewards, the first id is taken.

    >>> rows = pl.DataFrame({"experience_id": ["a", "b"], "group_id": "g", "reward": [0.0, 1.0],
    ...                      "source": "explorer"})
    >>> rows.pipe(copy_best()).select("parent_id", "reward", "source").row(2)
    ('b', 1.0, 'synthetic')
    """

    def best(frame: pl.LazyFrame) -> pl.LazyFrame:
        names = frame.collect_schema().names()
        good = pl.col("reward").is_finite()
        if "source" in names:
            good &= pl.col("source") != "synthetic"
        if min_reward is not None:
            good &= pl.col("reward") >= min_reward
        order = ["group_id", "reward", "experience_id"]
        first = frame.filter(good).sort(order, descending=[False, True, False])
        chosen = first.unique("group_id", keep="first").select("experience_id")
        # in the order of their parents, however rows are cut into parts
        copies = frame.join(chosen, on="experience_id", how="semi", maintain_order="left")
        own = [pl.lit(None, pl.String).alias(n) for n in ("experience_id", "group_id")]
        copies = copies.with_columns(pl.col("experience_id").alias("parent_id")).with_columns(own)
        changes = {
            "source": pl.lit("synthetic"),
            "rollout_index": pl.lit(0, pl.Int64),
            "created_at": pl.lit(None),
        }
        return copies.with_columns(**{n: e for n, e in changes.items() if n in names})

    return best


@operator(
    "augment",
    reads=(*derived_rows.READS, "group_id", "reward", "answer"),
    reads_all=True,
    scope="group",
)
def expert_answers(
    *,
    solved_above: float | None = 0.0,
    share: Share = 1.0,
    reward: float | None = 1.0,
    seed: int = 0,
) -> FrameFunction:
    """Add the task's reference answer as an `expert` row, to groups that did not solve their task.

    As in LUFFY (arXiv:2504.14945), the policy is shown what it cannot find out. The column `answer`
    must be a whole reply, as in GSM8K, not just a result; the rows need it in addition to the
    experience's columns: `SELECT e.*, t.answer FROM experiences e JOIN tasks t USING (task_id)`. A
    group is solved if one of its rewards is above `solved_above`; a group without rewards is left
    out; None adds a row to every group. A `share` of those groups, chosen by `seed`, gets one. The
    new row has the reward `reward`, no tokens, the first row of the group as its parent, and its
    own group. To mix experts and other rows by
    shares, add `mix_tasksets` with `by: source` after it, or mix them where they are drawn.

    >>> rows = pl.DataFrame({"experience_id": ["a"], "task_id": "t", "group_id": "g",
    ...     "reward": [0.0], "messages": None, "prompt_text": "2+2=", "response_text": "5",
    ...     "answer": "It is 4.", "source": "explorer"}, schema_overrides={"messages": pl.String})
    >>> rows.pipe(expert_answers()).select("parent_id", "source", "response_text", "reward").row(1)
    ('a', 'expert', 'It is 4.', 1.0)
    """

    def shown(row: derived_rows.ParentRow) -> derived_rows.Made:
        asked = derived_rows.question(row, derived_rows.conversation(row) or _asked(row))
        if not asked:
            return None
        reply = {"role": "assistant", "content": row["answer"]}
        return derived_rows.retold([*asked, reply], source="expert", reward=reward)

    def add(frame: pl.LazyFrame) -> pl.LazyFrame:
        first = pl.col("experience_id") == pl.col("experience_id").min().over("group_id")
        best = pl.col("reward").max().over("group_id")
        lucky = pl.col("group_id").map_elements(
            lambda name: seeded_uniform(seed, name) < share, return_dtype=pl.Boolean
        )
        given = first & pl.col("answer").is_not_null() & lucky
        needy = given if solved_above is None else given & (best <= solved_above)
        own = frame.collect_schema().names()
        chosen = frame.filter(needy & (pl.col("source") != "expert" if "source" in own else True))
        return derived_rows.new_rows(chosen, shown)

    return add


def _asked(row: derived_rows.ParentRow) -> list[dict[str, str]]:
    prompt = row.get("prompt_text")
    return [] if prompt is None else [{"role": "user", "content": prompt}]
