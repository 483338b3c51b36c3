"""Tasks in a folder of files that are solved with bash, which runs in the sandbox.

The reward is that of InterCode's bash (arXiv:2306.14898): what the commands have changed and
printed is compared with what the right command changes and prints.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from ...operators.sandbox import Limits, run_python
from ...store.errors import JobError
from ...store.records import Message, Task
from .environment import Step

_KEY, _SUBMIT = "bash", "submit"
_TAGGED = re.compile(r"<bash>((?:(?!<bash>).)*?)</bash>", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"```(?:bash|sh|shell)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_WORD = re.compile(r"\b\w\w+\b")
_HARNESS_SECONDS, _HARNESS_MEMORY = 10.0, 256 << 20
"""What the program around the command may use besides."""


class BashEnvironment:
    """A folder; each answer is a bash command, until one is `submit`.

    The task's `answer` is the right command. Its metadata has `bash`: `files`, texts by path (a
    path that ends in `/` is a folder), and `setup`, commands that make more.
    """

    def __init__(
        self,
        *,
        reward: Literal["intercode", "exact"] = "intercode",
        max_steps: int = 10,
        longest: int = 4000,
        seconds: float = 5.0,
        memory_mb: int = 256,
        disk_mb: int = 4,
        sandbox: Literal["confined", "unconfined"] = "confined",
    ) -> None:
        """Set the limits of a command; `longest` is the most bytes of its output that are shown.

        Each command runs in a sandbox of its own (`rlake.operators.sandbox`), which begins with the
        folder as the last one left it, in the folder that this one went to. What runs in the
        background ends with its command. A command that is ended for its memory or disk leaves the
        folder as it was. The reward comes with `submit`, or after `max_steps` answers: InterCode's
        (`compared`), or, as `exact`, 1 if all is as the right command leaves it, and 0 if not.
        """
        self._reward, self._max_steps, self._longest = reward, max_steps, longest
        self._seconds = seconds
        self._limits = Limits(
            seconds=2 * seconds + _HARNESS_SECONDS,
            memory=(memory_mb << 20) + _HARNESS_MEMORY,
            disk=disk_mb << 20,
            output=16 << 20,
            unconfined=sandbox == "unconfined",
        )
        self._num_steps, self._printed = 0, ""
        self._state, self._cwd, self._command = "", "", ""
        self._before: dict[str, str] = {}
        self._now: dict[str, str] = {}
        self._right = Outcome({}, "")

    async def reset(self, task: Task) -> str:
        """Make the folder, and run the right command on a copy of it."""
        about = (task.metadata or {}).get(_KEY)
        if not isinstance(about, Mapping) or task.answer is None:
            raise JobError(
                f"task {task.task_id} must have `{_KEY}` in its metadata, and an answer, the right "
                "command"
            )
        given = about.get("files") or {}
        if not isinstance(given, Mapping):
            raise JobError(
                f"`files` of task {task.task_id} must be texts by path, got {type(given).__name__}"
            )
        files = {str(name): str(text) for name, text in given.items()}
        if outside := [name for name in files if not _is_inside(name)]:
            raise JobError(
                f"`{outside[0]}` of task {task.task_id} is not below the folder; write a path "
                "without `..` that does not begin with `/`"
            )
        # the answer runs on a copy: its changes must not be part of the folder
        self._num_steps, self._printed, self._cwd, self._command = 0, "", "", task.answer
        made = {"files": files, "setup": str(about.get("setup") or ""), "state": None}
        said, how = await self._ask(task.answer, made, keep="before")
        if said is None or "unmade" in said:
            why = how if said is None else f"its setup {said['unmade']}"
            raise JobError(f"the folder of task {task.task_id} cannot be made: {why}")
        if said["code"] is None:
            limit = f"{self._seconds:g} s"
            raise JobError(
                f"the answer of task {task.task_id} takes longer than `seconds`, {limit}"
            )
        self._state, self._before, self._now = said["state"], said["before"], said["before"]
        self._right = Outcome(_changes(said["before"], said["after"]), said["output"])
        return ""

    async def step(self, answer: Message) -> Step:
        """Run the command of an answer, and show what it prints."""
        self._num_steps += 1
        is_last = self._num_steps >= self._max_steps
        command = command_in(str(answer.get("content") or ""))
        if command == _SUBMIT:
            return self._judged("", {})
        said, how = await self._ask(command, {"state": self._state}, keep="after")
        metrics: dict[str, float] = {}
        if said is None:
            # no output is left: it is lost with the state
            self._printed = shown = f"The command was ended: {how}."
        else:
            self._state, self._cwd, self._now = said["state"], said["cwd"], said["after"]
            self._printed, shown = said["output"], said["output"].rstrip("\n")
            if said["cut"]:
                shown += f"\n... {said['cut']} bytes more"
            if said["code"] is None:
                shown += f"\nThe command took longer than {self._seconds:g} s."
        # a time-out, whose code is None, is one too
        if said is None or said["code"] != 0:
            metrics["bash/errors"] = 1.0
        # a policy that never submits is judged by what it has done
        if is_last:
            return self._judged(shown, metrics)
        return Step(shown=shown or "(no output)", reward=0.0, metrics=metrics)

    async def expert(self) -> Message | None:
        """Return the right command, and then `submit`."""
        said = f"```bash\n{self._command}\n```" if self._num_steps == 0 else _SUBMIT
        return {"role": "assistant", "content": said}

    async def close(self) -> None:
        """Forget the folder; no process is left between two commands."""
        self._state = ""

    def _judged(self, shown: str, metrics: Mapping[str, float]) -> Step:
        # equal output, where the reward knows only its words
        done = Outcome(_changes(self._before, self._now), self._printed)
        parts = compared(done, self._right)
        is_won = done.changes == self._right.changes and _lines(done) == _lines(self._right)
        reward = float(is_won) if self._reward == "exact" else sum(parts.values()) / len(parts)
        measured = {f"bash/{name}": part for name, part in parts.items()}
        won = {"environment/won": 1.0} if is_won else {}
        return Step(
            shown=shown, reward=reward, is_done=True, metrics={**metrics, **measured, **won}
        )

    async def _ask(
        self, command: str, folder: Mapping[str, Any], *, keep: str
    ) -> tuple[dict[str, Any] | None, str]:
        """Run a command in a sandbox; return what the worker says, or None and why it was ended."""
        asked = {
            "command": command,
            "cwd": self._cwd,
            "keep": keep,
            "seconds": self._seconds,
            "most": self._longest,
            **folder,
        }
        ended = await run_python(_worker(), stdin=json.dumps(asked), limits=self._limits)
        # the state is lost with the program, and the folder stays as it was before
        if ended.how != "done":
            return None, ended.detail
        return json.loads(ended.output), ""


def bash(**parameters: Any) -> BashEnvironment:
    """Solve tasks with bash in a folder, as `{bash: {max_steps: 10, seconds: 5}}`."""
    return BashEnvironment(**parameters)


@dataclass(frozen=True)
class Outcome:
    """What commands have done: the changes by path, and what the last of them printed."""

    changes: Mapping[str, str]
    printed: str


def compared(done: Outcome, right: Outcome) -> dict[str, float]:
    """Return the three parts of InterCode's reward, each from 0 to 1; it is their mean.

    `files`: 1 - erf(the number of paths that only one of them has changed, or in another way);
    `contents`: of the paths that both have made or changed, the share with the same content;
    `output`: the cosine of the tf-idf vectors of what was printed. InterCode gives 0.33 for each
    and 0.01, and compares the contents of new files alone.

    >>> right = Outcome({"a": "made file 1"}, "two words")
    >>> compared(Outcome({"a": "made file 2"}, "two words"), right)
    {'files': 1.0, 'contents': 0.0, 'output': 1.0}
    >>> compared(Outcome({}, ""), right)["files"] == 1 - math.erf(1)
    True
    """
    # a path counts by the way it changed, and by its content below
    ways = [{(p, c.split()[0]) for p, c in each.changes.items()} for each in (done, right)]
    both = [path for path, way in ways[0] & ways[1] if way != "gone"]
    same = sum(done.changes[path] == right.changes[path] for path in both)
    return {
        "files": 1.0 - math.erf(len(ways[0] ^ ways[1])),
        "contents": same / len(both) if both else 1.0,
        "output": _similarity(done.printed, right.printed),
    }


def command_in(text: str) -> str:
    """Return the command of an answer: the last `<bash>` or fenced block, or else all of it.

    >>> command_in("I look:\\n```bash\\nls -l\\n```"), command_in(" submit\\n")
    ('ls -l', 'submit')
    """
    return (_TAGGED.findall(text) or _FENCED.findall(text) or [text])[-1].strip()


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    gone = {path: "gone" for path in before if path not in after}
    made = {path: f"made {now}" for path, now in after.items() if path not in before}
    changed = {p: f"changed {now}" for p, now in after.items() if before.get(p, now) != now}
    return {**gone, **made, **changed}


def _similarity(one: str, other: str) -> float:
    # also where neither has a word, of which the cosine would be 0/0
    if one == other:
        return 1.0
    counts = [Counter(_WORD.findall(text.lower())) for text in (one, other)]
    # scikit-learn's idf, smooth, of two documents
    in_both, in_one = 1.0, 1.0 + math.log(3 / 2)
    weights = {w: in_both if w in counts[1] else in_one for w in counts[0]}
    weights |= {w: in_one for w in counts[1] if w not in counts[0]}
    vectors = [{w: n * weights[w] for w, n in count.items()} for count in counts]
    norms = [math.sqrt(sum(x * x for x in vector.values())) for vector in vectors]
    dot = sum(x * vectors[1].get(w, 0.0) for w, x in vectors[0].items())
    return dot / (norms[0] * norms[1]) if all(norms) else 0.0


def _lines(done: Outcome) -> list[str]:
    return [line.rstrip() for line in done.printed.rstrip().splitlines()]


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


@cache
def _worker() -> str:
    return Path(__file__).with_name("bash_worker.py").read_text(encoding="utf-8")
