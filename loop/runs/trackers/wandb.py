"""Weights & Biases: a run of its own for each job, grouped by the run that they are of."""

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    from ..tracker import Tracked


@dataclass(kw_only=True, config=ConfigDict(extra="forbid"))
class Wandb:
    """Sends numbers to a server, or keeps them in files for `wandb sync`.

    A resumed job goes on in the same run. The server takes no step that is before its newest, so
    those that are done again stay as they were; they are the same numbers.
    """

    project: str = "rlake"
    entity: str | None = None
    """Team or user; None: the key's own."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """The key and a server of one's own are given as WANDB_API_KEY and WANDB_BASE_URL."""
    tags: tuple[str, ...] = ()
    folder: str | None = None
    """Where files are kept; None: `wandb` among the files of the run."""
    _run: Any = field(default=None, init=False, repr=False)
    _failed: bool = field(default=False, init=False, repr=False)

    def place(self, run: "Tracked") -> str:
        """Return the project, or the folder when nothing is sent."""
        if self.mode == "online":
            return f"project {self.entity}/{self.project}" if self.entity else self.project
        return f"{self.folder or run.folder}/wandb ({self.mode})"

    def start(self, run: "Tracked") -> None:
        """Begin the job's run, or go on with it."""
        import wandb

        folder = self.folder or str(run.folder)
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            tags=list(self.tags),
            dir=folder,
            id=f"{run.run_id}-{run.job}-{run.key}",
            name=run.name,
            group=run.run_id,
            job_type=run.job,
            config=dict(run.config),
            resume="allow" if self.mode == "online" else None,
            reinit="create_new",  # explorer and trainer may be in one process
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand numbers over to its own process, which sends or writes them."""
        self._run.log(dict(values), step=step)

    def fail(self, error: str) -> None:
        """Let the run be shown as failed."""
        del error
        self._failed = True

    def close(self) -> None:
        """Wait until all is sent or written."""
        self._run.finish(exit_code=int(self._failed))
