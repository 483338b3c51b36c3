"""Files of the shape of Guru's mathematics (LLM360/guru-RL-92k), which is that of verl's data."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import gsm8k

_ASKED = "{question} Put the answer into \\boxed{{}}."


def write_stand_in(folder: str | Path, *, train: int = 600, test: int = 400, seed: int = 0) -> Path:
    """Write train.jsonl and test.jsonl with the made-up questions of `recipes.gsm8k`.

    >>> folder = write_stand_in(tmp, train=2, test=3)
    >>> line = json.loads((folder / "train.jsonl").read_text().splitlines()[0])
    >>> sorted(line), line["reward_model"]["style"]
    (['ability', 'data_source', 'prompt', 'reward_model'], 'rule')
    """
    made = Path(folder)
    made.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        files = gsm8k.write_stand_in(work, train=train, test=test, seed=seed)
        for source in (files.train, files.test):
            text = "".join(f"{json.dumps(line)}\n" for line in _lines(source))
            (made / source.name).write_text(text, encoding="utf-8")
    return made


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        result = line["answer"].rsplit("#### ", 1)[1]
        asked = {"role": "user", "content": _ASKED.format(question=line["question"])}
        yield {
            "data_source": "math__stand_in",
            "ability": "math",
            "prompt": [asked],
            "reward_model": {"ground_truth": result, "style": "rule"},
        }
