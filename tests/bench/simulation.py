"""What schedules are worth with more explorers and engines than a machine has: a simulation.

Its latencies are measured first, with real rollouts and a real run on this machine without waits;
then it has to predict the runs of `python -m bench schedules`, which it has not seen.
"""

import asyncio
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import wraps
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from rlake.store import Store, Task, connect

from .figure import Bench, Figure, say
from .schedules import LONGEST, MEDIAN, SCHEDULES, SIGMA, configured

if TYPE_CHECKING:
    from rlake.loop.config import RunConfig

    from .simulated_run import Cluster, Costs, Outcome

ROLLOUTS, AT_ONCE = 4096, 256
SECONDS = 3.0
"""For which two threads work at once."""
STEPS, WARM_UP = 16, 4
"""Of the runs that measure what a step's parts cost."""
COMPARED, TURNS = 40, 2
"""Steps of each run that is compared with its prediction, and how often."""
EXPLORERS = (1, 4, 16, 64, 256)
ENGINES = (1, 2, 8, 32)
UNITS = {
    "steps_per_second": "steps/s",
    "rollouts_per_second": "rollouts/s",
    "lag_mean": "steps",
    "lag_largest": "steps",
}
"""Units of an outcome's numbers; the others are shares of the time."""


def simulation(bench: Bench) -> Iterator[Figure]:
    """Measure the parts, compare the prediction with real runs, and simulate larger clusters."""
    costs = []
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in SCHEDULES}
    for turn in range(TURNS):  # by turns, since the machine's speed changes
        costs.append(measured_costs(bench, turn))
        for name in SCHEDULES:
            both = _predicted(name, costs[-1]), _measured(bench, name, turn)
            say(f"{name}: {both[0]:.3f} s a step predicted, {both[1]:.3f} s measured")
            taken[name].append(both)
    yield from _parts(costs[-1])
    for name, found in taken.items():
        predicted, measured = (median(each) for each in zip(*found, strict=True))
        each = ", ".join(f"{a:.2f} and {b:.2f}" for a, b in found)
        what = (
            f"seconds a step, predicted from parts that were measured just before, and measured: "
            f"{each}; {COMPARED} steps as those of `python -m bench schedules`"
        )
        ratio = round(predicted / measured, 3)
        yield Figure(f"simulation_{name}_predicted", ratio, "predicted / measured", None, what)
    yield from simulated(costs[-1])


def _predicted(name: str, costs: "Costs") -> float:
    from .simulated_run import Cluster

    return 1 / outcome(name, costs, Cluster(room=None, is_shared=True)).steps_per_second


def _measured(bench: Bench, name: str, turn: int) -> float:
    config = _shorter(configured(name), COMPARED)
    taken = steps_taken(connect(bench.folder / f"simulation-{name}-{turn}"), config)
    return sum(taken[WARM_UP:]) / len(taken[WARM_UP:])


def steps_taken(store: Store, config: "RunConfig") -> list[float]:
    """Run, and return the seconds from the end of each step to that of the next."""
    from rlake.loop.run import run

    ends: list[float] = []

    def listen(job: str, number: int, values: object) -> None:
        if job == "train":
            ends.append(perf_counter())
        del number, values

    run(store, config, listener=listen)
    return np.diff(ends).tolist()


def _shorter(config: "RunConfig", steps: int) -> "RunConfig":
    trainer = config.trainer.model_copy(update={"steps": steps, "checkpoint_every": steps})
    return config.model_copy(update={"trainer": trainer})


def simulated(costs: "Costs") -> Iterator[Figure]:
    """Simulate the same run on clusters."""
    from .simulated_run import Cluster

    sizes = [(n, min(32, max(1, n // 8))) for n in EXPLORERS]
    sizes += [(256, n) for n in ENGINES if (256, n) not in sizes]
    speeds: dict[tuple[str, int], float] = {}
    for explorers, engines in sizes:
        for name in SCHEDULES:
            found = outcome(name, costs, Cluster(explorers, engines))
            if (explorers, engines) == sizes[EXPLORERS.index(explorers)]:
                speeds[name, explorers] = found.steps_per_second
            yield from _figures(f"simulation_{name}_{explorers}x{engines}", found)
    for n in EXPLORERS:
        ratio = speeds["asynchronous", n] / speeds["on_policy", n]
        what = f"steps/s at {n} explorers, one group each; {_work()}"
        yield Figure(f"simulation_speedup_{n}", round(ratio, 2), "x of on_policy's", None, what)


def outcome(schedule: str, costs: "Costs", cluster: "Cluster") -> "Outcome":
    """Simulate a schedule on a cluster."""
    from .simulated_run import SimulatedRun

    return SimulatedRun(configured(schedule), costs, cluster, seed=0).run()


def _figures(name: str, found: "Outcome") -> Iterator[Figure]:
    for key, value in asdict(found).items():
        unit = UNITS.get(key, "of the time")
        yield Figure(f"{name}_{key}", round(value, 3), unit, None, f"simulated; {_work()}")


def _work() -> str:
    return (
        f"32 groups of 8 rollouts a step, environment {MEDIAN} s in the median, log-normal, sigma "
        f"{SIGMA}, {LONGEST} s at most"
    )


def _parts(costs: "Costs") -> Iterator[Figure]:
    waits = costs.environment
    what = f"{len(waits)} rollouts of the workflow `long_tail`; 99 % take {_q(waits, 99):.3f} s"
    yield Figure(
        "part_rollout", round(_q(waits, 50), 4), "s", None, f"{what}, longest {max(waits):.3f}"
    )
    what = f"medians of {STEPS - WARM_UP} steps without waits, on one thread"
    for name, cost in (("sample", costs.sample), ("commit", costs.commit)):
        for n in (1, 32):
            yield Figure(
                f"part_{name}_{n}", round(cost(n), 5), "s", None, f"{n} groups of 8; {what}"
            )
    ratio = "two threads by one: a training step and sampling, each by its own speed"
    yield Figure("part_cores", round(costs.cores, 3), "cores", None, ratio)
    for name in ("handle", "pace", "look", "train", "swap", "wake"):
        yield Figure(f"part_{name}", round(getattr(costs, name), 5), "s", None, what)


def _q(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent))


# what parts cost


def measured_costs(bench: Bench, turn: int) -> "Costs":
    """Measure real rollouts, and the parts of two real runs: batches whole, and group by group."""
    from .simulated_run import Cost, Costs

    whole = parts(connect(bench.folder / f"simulation-whole-{turn}"), _without_waits(None))
    single = parts(connect(bench.folder / f"simulation-single-{turn}"), _without_waits(1))
    size = configured("on_policy").trainer.batch_size
    handled = whole["_run"] - whole["_append"] - whole["generate"]
    train = whole["_advance"] - whole["_wait"]
    known = train + whole["_run"] + whole["pace"] + whole["update_weights"] + whole["_look"]
    return Costs(
        environment=asyncio.run(_rollouts()),
        sample=Cost.through(size, single["generate"], whole["generate"]),
        handle=max(0.0, handled / size),
        commit=Cost.through(size, single["_append"], whole["_append"]),
        pace=single["pace"],
        look=single["_look"],
        train=train,
        swap=whole["update_weights"],
        wake=max(0.0, whole["step"] - known),
        cores=threads(),
    )


def threads() -> float:
    """Return how much a training step and sampling get done together, by each one's own speed."""
    import torch

    from . import engine
    from .throughput import Work, ours

    torch.set_num_threads(1)
    works = [ours(Work("grpo", 128, hidden=64)), engine.ours(engine.asked())]
    alone = [_speeds([work])[0] for work in works]
    return sum(both / one for both, one in zip(_speeds(works), alone, strict=True))


def _speeds(works: Sequence[Callable[[], object]]) -> list[float]:
    """Return how often a second each work was done, all at once, in a thread each."""
    ready = threading.Barrier(len(works))

    def repeated(work: Callable[[], object]) -> float:
        work()
        ready.wait()
        began, times = perf_counter(), 0
        while perf_counter() - began < SECONDS:
            work()
            times += 1
        return times / (perf_counter() - began)

    with ThreadPoolExecutor(len(works)) as pool:
        return [*pool.map(repeated, works)]


async def _rollouts() -> np.ndarray:
    """Return the seconds that rollouts with a long tail take, sampling left out."""
    from rlake.loop.inference.scripted import ScriptedPolicy
    from rlake.loop.recipes.toys import long_tail

    taken: list[float] = []

    async def one(number: int) -> None:
        task, policy = Task.ask(f"task {number}"), ScriptedPolicy(["answer"])
        began = perf_counter()
        await long_tail(task, policy, median=MEDIAN, sigma=SIGMA, longest=LONGEST)
        taken.append(perf_counter() - began)

    await one(0)  # loads what is loaded once
    taken.clear()
    for first in range(0, ROLLOUTS, AT_ONCE):
        await asyncio.gather(*(one(first + i) for i in range(AT_ONCE)))
    return np.sort(taken)


def _without_waits(chunk: int | None) -> "RunConfig":
    """Return the measured run with environments that answer at once, and few steps."""
    config = configured("on_policy")
    assert config.explorer is not None, "the measured run explores"
    explorer = config.explorer.model_copy(
        update={"workflow": "single_turn", "tasks_per_chunk": chunk}
    )
    return _shorter(config.model_copy(update={"explorer": explorer}), STEPS)


def parts(store: Store, config: "RunConfig") -> Mapping[str, float]:
    """Run, and return the median seconds of each part; `step` is that from one step to the next."""
    from rlake.loop.explorer.batched import BatchedExploration
    from rlake.loop.explorer.context import ExploreContext
    from rlake.loop.inference.chat_policy import ChatPolicy
    from rlake.loop.rollouts.workers import WorkerPool
    from rlake.loop.rollouts.writer import RolloutWriter
    from rlake.loop.trainer.data_loader import TrainDataLoader
    from rlake.loop.trainer.trainer import Trainer

    calls = [
        (BatchedExploration, "_run"),
        (ExploreContext, "pace"),
        (RolloutWriter, "_append"),
        (ChatPolicy, "generate"),
        (WorkerPool, "update_weights"),
        (TrainDataLoader, "_look"),
        (TrainDataLoader, "_wait"),
        (Trainer, "_advance"),
    ]
    with timed_calls(calls) as spent:
        taken = steps_taken(store, config)
    found = {n: median(each[len(each) * WARM_UP // STEPS :]) for n, each in spent.items()}
    return found | {"step": median(taken[WARM_UP:])}


@contextmanager
def timed_calls(calls: list[tuple[Any, str]]) -> Iterator[dict[str, list[float]]]:
    """Note the seconds of each call of some methods, waiting included."""
    spent: dict[str, list[float]] = defaultdict(list)

    def wrap(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @contextmanager
        def noted() -> Iterator[None]:
            began = perf_counter()
            yield
            spent[name].append(perf_counter() - began)

        @wraps(call)
        async def later(*args: Any, **options: Any) -> Any:
            with noted():
                return await call(*args, **options)

        @wraps(call)
        def now(*args: Any, **options: Any) -> Any:
            with noted():
                return call(*args, **options)

        return later if inspect.iscoroutinefunction(call) else now

    with ExitStack() as stack:
        for owner, name in calls:
            original = getattr(owner, name)
            setattr(owner, name, wrap(original, name))
            stack.callback(setattr, owner, name, original)
        yield spent
