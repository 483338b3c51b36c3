"""The pacer against a trainer that draws first in, first out: whatever happens, they agree."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from rlake.loop.config import ScheduleConfig
from rlake.loop.schedule.pacing import Pacer


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleConfig:
    max_ahead = draw(st.integers(0, 4))
    publish_every = draw(st.integers(1, max_ahead + 1))
    least = max_ahead + publish_every - 1
    max_lag = draw(st.none() | st.integers(least, least + 3))
    return ScheduleConfig(max_ahead=max_ahead, publish_every=publish_every, max_lag=max_lag)


SIZES = st.integers(1, 5)


def cut(n: int, cuts: list[int]) -> Iterator[int]:
    """Cut n into pieces."""
    for size in cuts:
        if n <= 0:
            return
        yield min(size, n)
        n -= size
    if n > 0:
        yield n


@given(schedules(), SIZES, st.integers(1, 25))
def test_with_nothing_dropped_each_batch_gets_the_newest_version_it_may(
    schedule: ScheduleConfig, batch_size: int, batches: int
) -> None:
    pacer = Pacer(schedule, new_units=lambda _: batch_size)
    lags = []
    for batch in range(1, batches + 1):
        newest = max(0, batch - 1 - schedule.max_ahead)
        assert pacer.step == batch
        assert pacer.version == newest // schedule.publish_every * schedule.publish_every
        lags.append(batch - 1 - pacer.version)
        pacer.stored([pacer.version] * batch_size)
    assert max(lags) <= schedule.max_ahead + schedule.publish_every - 1 <= schedule.lag


def test_the_lag_reaches_what_the_schedule_says_it_may() -> None:
    schedule = ScheduleConfig(max_ahead=3, publish_every=2)
    pacer = Pacer(schedule, new_units=lambda _: 1)
    lags = []
    for batch in range(1, 20):
        lags.append(batch - 1 - pacer.version)
        pacer.stored([pacer.version])
    assert max(lags) == schedule.lag == 4


@given(schedules(), SIZES, st.integers(1, 10), st.lists(st.integers(1, 3), max_size=4))
def test_the_version_of_a_batch_does_not_depend_on_its_commits(
    schedule: ScheduleConfig, batch_size: int, batches: int, cuts: list[int]
) -> None:
    whole, parts = (Pacer(schedule, new_units=lambda _: batch_size) for _ in range(2))
    for _ in range(batches):
        version = whole.version
        whole.stored([version] * batch_size)
        for piece in cut(batch_size, cuts):
            assert parts.version == version
            parts.stored([version] * piece)
    assert parts.step == whole.step


class Trainer:
    """Draws the oldest fresh units as soon as there are enough, and publishes by the schedule."""

    def __init__(self, schedule: ScheduleConfig, batch_size: int) -> None:
        self.schedule, self.batch_size = schedule, batch_size
        self.stored: list[int] = []
        self.step = 1
        self.published = {0}

    def take(self) -> None:
        while True:
            newest = self.step - 1
            fresh = [i for i, v in enumerate(self.stored) if newest - v <= self.schedule.lag]
            if len(fresh) < self.batch_size:
                return
            drawn = set(fresh[: self.batch_size])
            self.stored = [v for i, v in enumerate(self.stored) if i not in drawn]
            if self.step % self.schedule.publish_every == 0:
                self.published.add(self.step)
            self.step += 1


@given(schedules(), SIZES, st.lists(st.integers(0, 7), min_size=1, max_size=40))
def test_whatever_is_dropped_the_weights_asked_for_are_published_and_steps_go_on(
    schedule: ScheduleConfig, batch_size: int, survivors: list[int]
) -> None:
    pacer, trainer = Pacer(schedule, new_units=lambda _: batch_size), Trainer(schedule, batch_size)
    for units in survivors:
        asked, step = pacer.version, pacer.step
        assert asked in trainer.published
        assert step - 1 - asked <= schedule.lag
        pacer.stored([asked] * units)
        trainer.stored += [asked] * units
        trainer.take()
        assert pacer.step == trainer.step
        if pacer.step == step:
            assert pacer.version == asked
    before = pacer.step
    for _ in range(batch_size):
        pacer.stored([pacer.version])
    assert pacer.step > before


@given(schedules(), SIZES, st.lists(st.integers(0, 7), max_size=20))
def test_units_stored_before_a_restart_give_the_same_step_and_version(
    schedule: ScheduleConfig, batch_size: int, survivors: list[int]
) -> None:
    first, versions = Pacer(schedule, new_units=lambda _: batch_size), []
    for units in survivors:
        versions += [first.version] * units
        first.stored([first.version] * units)
    again = Pacer(schedule, new_units=lambda _: batch_size)
    again.stored(versions)
    assert (again.step, again.version) == (first.step, first.version)


def test_left_over_units_that_went_stale_are_not_counted() -> None:
    pacer = Pacer(ScheduleConfig(max_ahead=0, max_lag=0), new_units=lambda _: 4)
    pacer.stored([0] * 7)  # three are left over, and stale as soon as step 1 is drawn
    assert (pacer.step, pacer.version) == (2, 1)
    pacer.stored([1] * 3)
    assert (pacer.step, pacer.version) == (2, 1)
    pacer.stored([1])
    assert (pacer.step, pacer.version) == (3, 2)


def test_left_over_units_that_are_fresh_are_counted() -> None:
    pacer = Pacer(ScheduleConfig(max_ahead=0, max_lag=1), new_units=lambda _: 4)
    pacer.stored([0] * 7)
    pacer.stored([1])
    assert pacer.step == 3


def test_a_replay_is_one_batch_ahead_and_then_takes_up_a_few_new_units_a_step() -> None:
    pacer = Pacer(ScheduleConfig(max_lag=9), new_units=lambda step: 4 if step == 1 else 1)
    versions = []
    for _ in range(8):
        versions.append(pacer.version)
        pacer.stored([pacer.version])
    assert versions == [0, 0, 0, 0, 1, 2, 3, 4]
    assert pacer.step == 6


def test_steps_that_take_up_nothing_new_are_passed_over() -> None:
    pacer = Pacer(ScheduleConfig(), new_units=lambda step: step % 2)
    seen = [pacer.step]
    for _ in range(3):
        pacer.stored([pacer.version])
        seen.append(pacer.step)
    assert seen == [1, 3, 5, 7]
    late = Pacer(ScheduleConfig(), new_units=lambda step: int(step > 3))
    assert (late.step, late.version) == (4, 3), "what only the fourth step needs can wait for it"
