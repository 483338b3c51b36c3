"""The studio's server in a process of its own, and what tests store for it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlake.store import Store

HOSTILE = "<img src=x onerror='window.hacked=1'></script><script>window.hacked=2</script>"
HOSTILE += "{{constructor.constructor('window.hacked=3')()}}"
"""A text that would run in a page that read it as HTML, or as a template."""
HOUR = "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range * b.range % 7 = 3"
"""A query that takes longer than any test waits."""


@contextmanager
def studio(place: str | Path, *options: str) -> Iterator[str]:
    """Serve a store on a free port; yield the address, without the slash at its end."""
    words = [sys.executable, "-m", "rlake.loop.cli", "--store", str(place), "studio"]
    words += ["--port", "0", "--no-open", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http\S+?(?=/;)", server.stdout.readline())
            assert found is not None, "the server did not start; its error is above"
            yield found[0]
        finally:
            server.kill()


def hostile_rollouts(store: Store) -> str:
    """Store a group whose texts, names and numbers are an attack; return the ID of one."""
    messages = f'[{{"role": "user", "content": "{HOSTILE}"}}]'
    row = {
        "task_id": HOSTILE,
        "group_id": f"g{HOSTILE}",
        "run_id": HOSTILE,
        "source": "explorer",
        "finish_reason": HOSTILE,
        "messages": messages,
        "prompt_text": HOSTILE,
        "response_text": HOSTILE,
        "rewards": [{"name": HOSTILE, "value": 0.5}],
        "reward": 0.5,
    }
    ids = [f"x{i}{HOSTILE}" for i in range(2)]
    store.append(
        "experiences",
        [row | {"experience_id": one, "rollout_index": i} for i, one in enumerate(ids)],
    )
    return ids[0]
