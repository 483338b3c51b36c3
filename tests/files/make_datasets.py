"""Makes saved/ and splits/: preference pairs that `datasets` saved to disk, whole and in splits.

Run with datasets 5.2: `python tests/files/make_datasets.py`.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

import shutil
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

HERE = Path(__file__).parent


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


PAIRS: list[dict[str, Any]] = [
    {
        "prompt": [say("system", "Be brief."), say("user", f"{i}+{i}=")],
        "chosen": [say("assistant", str(2 * i))],
        "rejected": [say("assistant", "no idea, é")],
        "score_chosen": 1.0,
        "score_rejected": 0.25 * i,
    }
    for i in range(3)
]

if __name__ == "__main__":
    for name in ("saved", "splits"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    Dataset.from_list(PAIRS).save_to_disk(HERE / "saved", num_shards=2)
    splits = {"train": Dataset.from_list(PAIRS[:2]), "test": Dataset.from_list(PAIRS[2:])}
    DatasetDict(splits).save_to_disk(HERE / "splits")
