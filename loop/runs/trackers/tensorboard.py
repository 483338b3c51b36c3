"""TensorBoard: event files in the run's folder, one folder a job."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    from ..tracker import Tracked


@dataclass(kw_only=True, config=ConfigDict(extra="forbid"))
class TensorBoard:
    """Writes what `tensorboard --logdir FOLDER` shows; superseded steps are not shown."""

    folder: str | None = None
    """Where each run gets a folder; None: `tensorboard` among the files of the run."""
    _writer: Any = field(default=None, init=False, repr=False)

    def place(self, run: "Tracked") -> str:
        """Return the folder for `--logdir`."""
        if self.folder is None:
            return str(run.folder / "tensorboard")
        return str(Path(self.folder).expanduser().absolute())

    def start(self, run: "Tracked") -> None:
        """Open a new event file, which takes the place of what others have of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        own = run.name if self.folder else run.job
        purge = run.start_step if run.attempt > 1 else None
        self._writer = SummaryWriter(f"{self.place(run)}/{own}", purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers to the file."""
        assert self._writer is not None, "a tracker is started before it receives numbers"
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
