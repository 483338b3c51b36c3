"""All rollouts of a group in one workflow: the policies that it receives, and its rows."""

from collections.abc import Sequence
from typing import Any

from ...store.ids import rollout_id
from ...store.records import Experience
from ..inference.policy import Turn
from .trajectory import RolloutPolicy, with_tokenizer


class GroupPolicies(tuple[RolloutPolicy, ...]):
    """The policies of a group's rollouts, as passed to a workflow under `@of_group`."""

    @property
    def version(self) -> int | None:
        """The policy version that would answer a request sent now."""
        return self[0].version

    @property
    def turns(self) -> list[Turn]:
        """The turns so far, rollout after rollout."""
        return [turn for policy in self for turn in policy.turns]

    def finalize(self, rows: Sequence[Experience]) -> list[Experience]:
        """Return a group's rows; metrics of single rollouts are not added to them."""
        return with_tokenizer(rows, self.turns)


def named(
    rows: Sequence[Experience], group: str, number: int | None, **columns: Any
) -> list[Experience]:
    """Set the ids of the rows of rollout `number`, or of a whole group if `number` is None.

    The rows of a whole group name their rollout in `rollout_index`. A row with its own `group_id`
    is put into the subgroup of that name.
    """
    made: list[Experience] = []
    seen: dict[int, int] = {}
    for row in rows:
        rollout = row.rollout_index if number is None else number
        # Positions count within each rollout, so that repeating a group gives the same ids.
        position = seen.get(rollout, 0)
        seen[rollout] = position + 1
        made.append(
            row.updated(
                experience_id=rollout_id(group, rollout, position),
                group_id=f"{group}/{row.group_id}" if row.group_id else group,
                rollout_index=rollout,
                **columns,
            )
        )
    return made


def as_judged(rows: Sequence[Experience], follows: Sequence[bool]) -> list[Experience]:
    """Give each row marked in `follows` the reward of the last row of its rollout."""
    pairs = list(zip(rows, follows, strict=True))
    lasts = {row.rollout_index: row for row, is_following in pairs if not is_following}
    made = []
    for row, is_following in pairs:
        if is_following:
            last = lasts[row.rollout_index]
            reason = row.drop_reason or last.drop_reason
            row = row.updated(reward=last.reward, rewards=last.rewards, drop_reason=reason)
        made.append(row)
    return made
