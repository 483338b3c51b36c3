"""SwanLab: a run for each process, since it can have but one at a time."""

import threading
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    from ..tracker import Tracked


@dataclass(kw_only=True, config=ConfigDict(extra="forbid"))
class Swanlab:
    """Sends numbers to a server, or keeps them in files for `swanlab sync`.

    Explorer and trainer in one process write to one run of it, named after the first of them. A
    resumed job goes on in it when it is online; offline each attempt has files of its own.
    """

    project: str = "rlake"
    workspace: str | None = None
    mode: Literal["online", "offline", "local", "disabled"] = "online"
    """The key is given as SWANLAB_API_KEY, or by `swanlab login`."""
    tags: tuple[str, ...] = ()
    folder: str | None = None
    """Where files are kept; None: `swanlog` among the files of the run."""
    _failed: bool = field(default=False, init=False, repr=False)

    _open: ClassVar[list[Any]] = []
    """The process's run, once for each job that writes to it."""
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def place(self, run: "Tracked") -> str:
        """Return the project, or the folder when nothing is sent."""
        if self.mode == "online":
            return f"project {self.workspace}/{self.project}" if self.workspace else self.project
        return f"{self._folder(run)} ({self.mode})"

    def _folder(self, run: "Tracked") -> Path:
        return Path(self.folder).expanduser().absolute() if self.folder else run.folder / "swanlog"

    def start(self, run: "Tracked") -> None:
        """Begin the process's run or go on with it, or join that of the other job."""
        import swanlab

        with self._lock:  # explorer and trainer, threads of one process, may start at the same time
            self._open.append(self._open[-1] if self._open else self._begin(swanlab, run))

    def _begin(self, swanlab: Any, run: "Tracked") -> Any:
        online = self.mode == "online"
        probe = swanlab.Settings.Probe(hardware=False, git=False, requirements=False, monitor=False)
        return swanlab.init(
            project=self.project,
            workspace=self.workspace,
            mode=self.mode,
            log_dir=str(self._folder(run)),
            name=run.name,
            group=run.run_id,
            job_type=run.job,
            tags=list(self.tags),
            config=dict(run.config),
            id=run.key if online else None,
            resume="allow" if online else None,
            settings=swanlab.Settings(
                interactive=False, terminal={"proxy_type": "none"}, probe=probe
            ),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand numbers over; it takes each step of a metric once."""
        self._open[-1].log(dict(values), step=step)

    def fail(self, error: str) -> None:
        """Let the run be shown as crashed."""
        del error
        self._failed = True

    def close(self) -> None:
        """Leave the run; the last that does ends it."""
        with self._lock:
            run = self._open.pop()
            if not self._open:
                run.finish(state="crashed" if self._failed else "success")
