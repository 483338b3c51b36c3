"""All tries of a group in one workflow: what it is given, and what becomes of its rows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...store.ids import rollout_id
from ...store.records import Experience
from ..inference.policy import Turn
from .trajectory import RolloutPolicy, with_tokenizer


class GroupPolicies:
    """The policies of a group's tries, as a workflow under `@of_group` is given them."""

    def __init__(self, policies: Sequence[RolloutPolicy]) -> None:
        self._policies = list(policies)

    def __getitem__(self, number: int) -> RolloutPolicy:
        """Return a try's policy, by the number of the try."""
        return self._policies[number]

    def __len__(self) -> int:
        """Return how many tries the group has."""
        return len(self._policies)

    def __iter__(self) -> Iterator[RolloutPolicy]:
        """Go through the tries' policies."""
        return iter(self._policies)

    @property
    def version(self) -> int | None:
        """The version that a request sent now is answered with."""
        return self._policies[0].version

    @property
    def turns(self) -> list[Turn]:
        """What was asked and answered so far, try after try."""
        return [turn for policy in self._policies for turn in policy.turns]

    def finalize(self, rows: Sequence[Experience]) -> list[Experience]:
        """Return a group's rows; what single tries noted is theirs."""
        return with_tokenizer(rows, self.turns)


def named(rows: Sequence[Experience], group: str, number: int | None) -> list[Experience]:
    """Name the rows of try `number`, or of a whole group, whose rows say which try each is of.

    A row that has a `group_id` of its own stands apart, in the group of that name below this one.
    """
    made: list[Experience] = []
    seen: dict[int, int] = {}
    for row in rows:
        rollout = row.rollout if number is None else number
        place = seen.get(rollout, 0)
        seen[rollout] = place + 1
        made.append(
            replace(
                row,
                experience_id=rollout_id(group, rollout, place),
                group_id=f"{group}/{row.group_id}" if row.group_id else group,
                rollout=rollout,
            )
        )
    return made


def as_judged(rows: Sequence[Experience], follows: Sequence[bool]) -> list[Experience]:
    """Give each row that follows the reward of the row that the same try ended with."""
    last = {row.rollout: row for row, one in zip(rows, follows, strict=True) if not one}
    return [
        _with_reward_of(last[row.rollout], row) if one else row
        for row, one in zip(rows, follows, strict=True)
    ]


def _with_reward_of(last: Experience, row: Experience) -> Experience:
    reason = row.drop_reason or last.drop_reason
    return replace(row, reward=last.reward, rewards=last.rewards, drop_reason=reason)
