"""What a configuration comes to: its settings, what follows from them, and its memory."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ...store.errors import counted

if TYPE_CHECKING:
    from ..config import RunConfig
    from ..trainer.memory import Estimate


def plan(config: "RunConfig", *, full: bool) -> str:
    """Return a configuration as text that can be run.

    The settings that were given as YAML, with comments that say what follows from
    them; or with `full` all settings as JSON.
    """
    if full:
        return json.dumps(config.plain(), indent=2, ensure_ascii=False)
    given = config.plain(exclude_unset=True)
    text = yaml.safe_dump(given, sort_keys=False, allow_unicode=True, width=100)
    follows = "".join(f"#   {line}\n" for line in _follows(config))
    return f"{text}\n# From this follows (all settings, defaults included: --full):\n{follows}"


def _follows(config: "RunConfig") -> list[str]:
    from ..algorithms import resolve

    algorithm, trainer, explorer = resolve(config.algorithm), config.trainer, config.explorer
    unit = algorithm.unit
    sizes = [one.group_size or algorithm.group_size for one in config.explorers.values()]
    fewest, most = (min(sizes), max(sizes)) if explorer else (1, 1)
    path = config.model.path
    from_hub = path is not None and not Path(path).is_dir()
    lines = [f"a step trains on {counted(trainer.batch_size, unit)}"]
    if unit == "group":
        several = f"{fewest} to " if fewest < most else ""
        rows = [f"{trainer.batch_size * n:,}" for n in dict.fromkeys((fewest, most))]
        lines[0] += f" of {several}{counted(most, 'rollout')}: {' to '.join(rows)} rows"
    if trainer.steps is None:
        lines.append(f"the run ends when each row was drawn {counted(trainer.max_uses, 'time')}")
    else:
        drawn = trainer.steps * trainer.batch_size
        lines.append(f"{counted(trainer.steps, 'step')} draw {counted(drawn, unit)}")
    if (processes := trainer.distributed.world_size or 1) > 1:
        for of, mesh in trainer.distributed.meshes(processes).items():
            sizes = " x ".join(f"{name} {size}" for name, size in mesh.items())
            lines.append(f"the {of} are on a mesh of {processes} processes: {sizes}")
    advantage = algorithm.advantage()
    if advantage is not None:
        lines.append(f"the advantage of a row is `{advantage}`")
    if explorer is None:
        lines.append("no explorer: it trains on what is stored when it begins")
    else:
        lines += [*_rollouts(config, algorithm.group_size), *_pace(config)]
    if from_hub:
        lines.append(f"the model `{path}` comes from the hub: no local folder has this name")
    where = config.output or "`runs/` in the store's folder"
    lines.append("`rlake doctor CONFIG` estimates its memory, by the models' own configurations")
    return [*lines, f"checkpoints and weights are kept in {where}"]


def memory_rows(found: "Estimate") -> list[tuple[str, str, str, str]]:
    """Return a row for each part of an estimate, and for the sum of each device."""
    from ..trainer.memory import size

    parts = [(p.name, found.place(p), size(p.bytes), p.kind) for p in found.parts]
    sums = [
        ("needed", device, f"{size(found.needed(device))} of {size(most)}", "without limits")
        for device, most in found.available.items()
    ]
    return [*parts, *sums]


def _rollouts(config: "RunConfig", group_size: int) -> list[str]:
    """Return by what rollouts are made and rewarded, for each taskset of a mixture."""
    mixture = config.tasks.mixture
    if mixture is None:
        [how] = config.explorers.values()
        return [f"rollouts are made by `{how.workflow}` and rewarded by `{how.rewards}`"]
    total = sum(one.weight for one in mixture.values())
    lines = []
    for name, one in mixture.items():
        how = config.explorer_for(name)
        size, sampling = how.group_size or group_size, how.sampling
        lines += [
            f"of a batch, {one.weight / total:.0%} are tasks of `{name}`: rollouts are made by "
            f"`{how.workflow}` and rewarded by `{how.rewards}`",
            f"  {counted(size, 'rollout')} of a task, each response of at most "
            f"{counted(sampling.max_tokens, 'token')} at temperature {sampling.temperature:g}; a "
            f"rollout takes at most {how.rollout_timeout:g} s and is retried "
            f"{counted(how.max_retries, 'time')}",
        ]
    return lines


def _pace(config: "RunConfig") -> list[str]:
    explorer, schedule = config.explorer, config.schedule
    assert explorer is not None
    ahead = counted(schedule.max_ahead, "batch", "batches")
    lag = counted(schedule.lag, "step")
    return [f"the explorer is at most {ahead} ahead, and rows are drawn at most {lag} old"]
