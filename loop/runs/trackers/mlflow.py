"""MLflow: a run for each job, on a server or in files."""

import os
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    from ..tracker import Tracked

MOST_PARAMETERS, LONGEST_PARAMETER = 100, 500
LOCK_SECONDS = 30.0
"""How long a job waits while another begins in the same folder."""
_KEY = "rlake.key"


@dataclass(kw_only=True, config=ConfigDict(extra="forbid"))
class Mlflow:
    """Sends numbers to a tracking server.

    A resumed job goes on in the same run; steps that the server has of a metric are not sent again.
    """

    uri: str | None = None
    """Address of the server, or a folder; None: MLFLOW_TRACKING_URI, else `mlruns` among the files
    of the run."""
    experiment: str = "rlake"
    tags: dict[str, str] = field(default_factory=dict)
    _client: Any = field(default=None, init=False, repr=False)
    _id: str = field(default="", init=False, repr=False)
    _known: dict[str, int] | None = field(default=None, init=False, repr=False)
    _failed: bool = field(default=False, init=False, repr=False)

    def place(self, run: "Tracked") -> str:
        """Return the address, and the experiment's name."""
        return f"{self._uri(run)} (experiment {self.experiment})"

    def _uri(self, run: "Tracked") -> str:
        return self.uri or os.environ.get("MLFLOW_TRACKING_URI") or str(run.folder / "mlruns")

    def start(self, run: "Tracked") -> None:
        """Begin the job's run, or go on with it."""
        uri = self._uri(run)
        if "://" not in uri or uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        # We retry ourselves; the client would retry for minutes, while the end of a job waits.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        with _alone(uri, run):
            found = self._client.get_experiment_by_name(self.experiment)
            experiment = found.experiment_id if found else self._create()
        same = self._client.search_runs([experiment], f"tags.`{_KEY}` = '{run.key}'")
        if same:
            self._id = same[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            self._known = {} if run.start_step is not None else None
            return
        tags = {_KEY: run.key, "rlake.run": run.run_id, "rlake.job": run.job, **self.tags}
        self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        self._describe(run.config)

    def _create(self) -> str:
        try:
            return self._client.create_experiment(self.experiment)
        except Exception:  # another client of the server may just have created it
            found = self._client.get_experiment_by_name(self.experiment)
            if found is None:
                raise
            return found.experiment_id

    def _describe(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(k, str(v)[:LONGEST_PARAMETER]) for k, v in flat(config).items()]
        for i in range(0, len(params), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=params[i : i + MOST_PARAMETERS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        new = [Metric(k, v, now, step) for k, v in values.items() if not self._has(k, step)]
        if new:
            self._client.log_batch(self._id, metrics=new)

    def _has(self, name: str, step: int) -> bool:
        """Return whether an earlier attempt sent this step already."""
        if self._known is None:
            return False
        if name not in self._known:
            history = self._client.get_metric_history(self._id, name)
            self._known[name] = max((m.step for m in history), default=-1)
        return step <= self._known[name]

    def fail(self, error: str) -> None:
        """Let the run be shown as failed."""
        del error
        self._failed = True

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FAILED" if self._failed else "FINISHED")


def _alone(uri: str, run: "Tracked") -> FileLock:
    # Files accept two experiments of one name, so that only one job at a time may look for it and
    # create it. A server that keeps files has the same problem: there, the jobs of one run exclude
    # each other at least.
    from mlflow.utils.file_utils import local_file_uri_to_path
    from mlflow.utils.uri import is_local_uri

    folder = Path(local_file_uri_to_path(uri)) if is_local_uri(uri) else run.folder
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / ".experiment.lock", timeout=LOCK_SECONDS)


def flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of a tree by their dotted names, those that are None left out.

    >>> flat({"trainer": {"steps": 3, "where": None}, "trackers": ["mlflow"]})
    {'trainer.steps': 3, 'trackers': ['mlflow']}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            found |= flat(value, name)
        elif value is not None:
            found[name] = value
    return found
