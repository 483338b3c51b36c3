"""More explorers for a run that is under way: whoever wants them asks its register on Ray."""

from typing import Any

from ....store.errors import ConfigError, JobError
from ...config import RunConfig
from ...runs.ray import NAMESPACE, connected, last_line


def register_name(run_id: str) -> str:
    """Return the name of a run's register."""
    return f"run/{run_id}"


def join(config: RunConfig, *, explorers: int) -> int:
    """Add explorers to a run that is exploring on the cluster; return how many it has then.

    They take what `ray` said when the run was started, and end with it. Raises JobError when
    there is no such run, or the cluster has no room.
    """
    cluster = config.ray
    if cluster is None:
        raise ConfigError(
            "the configuration has no `ray` section; only a run on Ray takes more explorers"
        )
    with connected(cluster, starts=False) as ray:
        try:
            register: Any = ray.get_actor(register_name(config.name), namespace=NAMESPACE)
            asked = register.ask.remote(explorers)
            message = ray.get(asked, timeout=2 * cluster.startup_timeout)
        except ValueError as error:
            raise JobError(
                f"run `{config.name}` is not exploring on the cluster `{cluster.address}`"
            ) from error
        except ray.exceptions.RayError as error:
            raise JobError(f"run `{config.name}` did not answer: {last_line(error)}") from error
    if isinstance(message, str):
        raise JobError(message)
    return message
