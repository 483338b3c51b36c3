"""A run as discrete events, on any number of explorers and engines, paced by the product's code.

The pacer, the pool of units and the strategy that draws from it, the rule by which weights are
published and the choice of an explorer are those of a run; only what takes time is simulated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from rlake.loop.algorithms import resolve
from rlake.loop.config import RunConfig
from rlake.loop.explorer.batched import SHARED_SECONDS
from rlake.loop.rollouts.workers import least_busy
from rlake.loop.schedule.pacing import Pacer, is_published
from rlake.loop.schedule.samplers import strategy
from rlake.loop.schedule.units import batch_tasks, new_units
from rlake.store.replay import Freshness
from rlake.store.replay.growable_arrays import GrowableArray
from rlake.store.replay.unit_pool import Pool, UnitPool

from .events import Clock, Done, Processor, Server


@dataclass(frozen=True)
class Cost:
    """Seconds that a batch of n groups takes."""

    base: float
    each: float

    def __call__(self, n: int) -> float:
        return self.base + n * self.each

    @classmethod
    def through(cls, n: int, one: float, many: float) -> "Cost":
        """Return the cost through the seconds of one group and of n."""
        each = max(0.0, (many - one) / (n - 1))
        return cls(max(0.0, one - each), each)


@dataclass(frozen=True)
class Costs:
    """What a run's parts take, in seconds."""

    environment: np.ndarray
    """Of each of some measured rollouts, beside sampling."""
    sample: Cost
    """To sample the rollouts of groups, by an engine."""
    handle: float
    """To make the rows of a group, by its explorer."""
    commit: Cost
    pace: float
    """To read the index again after a commit, by the explorer."""
    look: float
    """The same, and to try a draw, by the trainer."""
    train: float
    """A training step: its rows' payload, the update, and the publication."""
    swap: float
    """To load weights into an engine."""
    wake: float
    """Until explorer and trainer notice what the other stored, both together, in a step."""
    cores: float
    """How much two threads of one process get done, by what one does."""


@dataclass(frozen=True)
class Cluster:
    """What a run has."""

    explorers: int = 1
    engines: int = 1
    room: int | None = 1
    """Most concurrent groups of an explorer; None: any number."""
    is_shared: bool = False
    """Whether all parts are threads of one process; if not, each has a core of its own."""


@dataclass(frozen=True)
class Outcome:
    """How a simulated run went."""

    steps_per_second: float
    rollouts_per_second: float
    lag_mean: float
    lag_largest: int
    explorer_idle: float
    """Share of the time in which an explorer has no group."""
    engine_idle: float
    trainer_idle: float
    writer_busy: float
    """Share of the time in which the store's writer commits."""


class SimulatedRun:
    """A run whose work takes the time that it costs, on a clock of events."""

    def __init__(self, config: RunConfig, costs: Costs, cluster: Cluster, *, seed: int) -> None:
        algorithm = resolve(config.algorithm)
        assert algorithm.grouped, "a unit of the simulation is a group"
        assert config.explorer is not None, "a run that is simulated explores"
        self._config, self._costs, self._cluster = config, costs, cluster
        self._steps, self._units_per_step = config.trainer.steps or 0, config.trainer.batch_size
        self._group_size = config.explorer.group_size or algorithm.group_size
        self._batch_tasks = batch_tasks(config, algorithm)
        self._rng = np.random.default_rng(seed)
        self.clock = Clock()
        shared = Processor(self.clock, costs.cores) if cluster.is_shared else None
        own = lambda: shared or Processor(self.clock)  # noqa: E731 - as short as a function
        self._trainer, self._driver = own(), own()
        self._engines = [Server(own(), costs.sample) for _ in range(cluster.engines)]
        self._handlers = [own() for _ in range(cluster.explorers)]
        self._writer = Server(self._driver, costs.commit)
        self._pacer = Pacer(config.schedule, new_units=new_units(config))
        drawable, versions, times = map(GrowableArray, (np.bool_, np.int32, np.int32))
        self._units = UnitPool(drawable, versions, times, None)
        self._pool = Pool(self._units, max_draws=config.trainer.max_uses)
        self._freshness = Freshness(config.schedule.lag)
        self._strategy = strategy(config.trainer.sampler)
        self._explorers: dict[int, list[int]] = {i: [] for i in range(cluster.explorers)}
        self._queues: dict[int, list[Done]] = {i: [] for i in range(cluster.explorers)}
        self._busy_slots, self._trained, self._step = 0.0, 0.0, 0
        self._published = self._loaded = self._begun = self._under_way = 0
        self._is_looking = self._is_swapping = self._is_training = False
        self._is_batch_open, self._news = False, False
        self._lags: list[np.ndarray] = []

    def run(self) -> Outcome:
        """Run to the last step."""
        self._explore()
        self.clock.run(lambda: self._step >= self._steps)
        assert self._step == self._steps, f"the run stopped at step {self._step}, with no event"
        return self._outcome()

    # the explorer's side

    def _explore(self) -> None:
        """Begin what the schedule allows now."""
        if self._config.schedule.streaming:
            self._follow()
            while self._pacer.admits(self._under_way, self._loaded) and not self._is_over:
                self._begin(self._store)
        elif not self._is_batch_open and not self._is_over:
            if self._published < self._pacer.version:
                return
            self._is_batch_open = True
            self._load(self._pacer.version, self._run_batch)

    @property
    def _is_over(self) -> bool:
        return self._pacer.step > self._steps

    def _follow(self) -> None:
        """Load the newest weights, one version at a time."""
        if self._published > self._loaded and not self._is_swapping:
            self._load(self._published, self._explore)

    def _load(self, version: int, done: Done) -> None:
        """Load weights into all engines."""
        if version == self._loaded:
            done()
            return
        self._is_swapping, left = True, [len(self._engines)]

        def one() -> None:
            left[0] -= 1
            if not left[0]:
                self._loaded, self._is_swapping = version, False
                done()

        for engine in self._engines:
            engine.processor.work(self._costs.swap, one)

    def _run_batch(self) -> None:
        """Run a batch; groups that end early share the first commit, as in a run."""
        left, begun, waiting = [self._batch_tasks], self.clock.now, list[int]()

        def ended(version: int) -> None:
            left[0] -= 1
            waiting.append(version)
            if not left[0] or self.clock.now >= begun + SHARED_SECONDS:
                flush()

        def flush() -> None:
            versions, waiting[:] = waiting[:], []
            for version in versions:
                self._store(version)

        self.clock.after(SHARED_SECONDS, flush)
        for _ in range(self._batch_tasks):
            self._begin(ended)

    def _begin(self, done: Callable[[int], None]) -> None:
        """Give a group to the explorer with the fewest."""
        self._under_way += 1
        self._begun += 1
        name, number = least_busy(self._explorers), self._begun
        self._explorers[name].append(number)
        start = partial(self._sample, name, number, done)
        room = self._cluster.room
        if room is None or len(self._explorers[name]) <= room:
            start()
        else:
            self._queues[name].append(start)

    def _sample(self, name: int, number: int, done: Callable[[int], None]) -> None:
        began, version = self.clock.now, self._loaded
        engine = self._engines[name % len(self._engines)]
        waits = self._rng.choice(self._costs.environment, self._group_size)

        def ended() -> None:
            self._explorers[name].remove(number)
            self._busy_slots += self.clock.now - began
            if self._queues[name]:
                self._queues[name].pop(0)()
            done(version)

        def handle() -> None:
            self._handlers[name].work(self._costs.handle, ended)

        # the group ends with its slowest rollout
        engine.add(lambda: self.clock.after(float(waits.max()), handle))

    def _store(self, version: int) -> None:
        self._writer.add(lambda: self._stored(version))

    def _stored(self, version: int) -> None:
        """Count a durable group: the trainer sees it, and the explorer goes on."""
        self._under_way -= 1
        self._units.drawable.extend(np.ones(1, np.bool_))
        self._units.versions.extend(np.full(1, version, np.int32))
        self._units.times.extend(np.zeros(1, np.int32))
        self._pacer.stored([version])
        if not self._news:
            self._news = True
            self.clock.after(0.0, self._noticed)

    def _noticed(self) -> None:
        """After a commit: the trainer looks; the explorer does so once a batch is whole."""
        self._news = False
        self._look()
        self._is_batch_open = self._is_batch_open and self._under_way > 0
        if not self._is_batch_open:
            self._driver.work(self._costs.pace, self._explore)

    # the trainer's side

    def _look(self) -> None:
        """Try to draw the next step's units."""
        if not self._is_training and not self._is_looking and self._step < self._steps:
            self._is_looking = True
            self._trainer.work(self._costs.look, self._looked)

    def _looked(self) -> None:
        self._is_looking = False
        pool, step, size = self._pool, self._step + 1, self._units_per_step
        pool.look(oldest=self._freshness.oldest(step - 1), horizon=None)
        if pool.size < size:
            return
        units, _ = self._strategy.choose(pool, size, self._rng)
        self._units.times.values[units] += 1
        pool.touch(units)
        self._lags.append(step - 1 - self._units.versions.values[units])
        self._is_training, began = True, self.clock.now
        self._trainer.work(self._costs.train, lambda: self._trained_step(step, began))

    def _trained_step(self, step: int, began: float) -> None:
        self._trained += self.clock.now - began
        self._step, self._is_training = step, False
        if is_published(self._config.schedule, step):
            self.clock.after(self._costs.wake, lambda: self._publish(step))
        self._look()

    def _publish(self, step: int) -> None:
        self._published = step
        self._explore()

    def _outcome(self) -> Outcome:
        taken, cluster = self.clock.now, self._cluster
        lags = np.concatenate(self._lags)
        room = cluster.explorers * (cluster.room or 1)
        return Outcome(
            self._step / taken,
            self._step * self._units_per_step * self._group_size / taken,
            float(lags.mean()),
            int(lags.max()),
            max(0.0, 1 - self._busy_slots / (room * taken)),
            1 - sum(engine.busy for engine in self._engines) / (len(self._engines) * taken),
            1 - self._trained / taken,
            self._writer.busy / taken,
        )
