"""Makes verl.jsonl with the writer of verl's trainer, taken out of verl 0.8.0's source.

The module that holds it needs a GPU stack to be imported; the function needs `json` and `os` alone.
Run with the path of `verl/trainer/ppo/ray_trainer.py`: `python tests/files/make_verl.py PATH`.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

import ast
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def writer(source: Path) -> Any:
    tree = ast.parse(source.read_text())
    found = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "_write_generations"
    )
    found.decorator_list = []
    names: dict[str, Any] = {"json": json, "os": os}
    exec(compile(ast.Module([found], []), str(source), "exec"), names)
    return names["_write_generations"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        writer(Path(sys.argv[1]))(
            inputs=["user\n2+2=\nassistant\n"] * 2 + ["user\nCafé?\nassistant\n"],
            outputs=["4", "<think>hm</think>5", "ünsure"],
            gts=["4", "4", {"any": ["yes", "no"]}],
            scores=[1.0, 0.0, 0.5],
            reward_extra_infos_dict={
                "acc": [True, False, False],
                "format": [1.0, 0.5, 0.25],
                "note": ["right", "wrong", None],
                "request_id": ["a1", "b2", "c3"],
            },
            dump_path=folder,
            global_steps=7,
        )
        shutil.copy(Path(folder, "7.jsonl"), HERE / "verl.jsonl")
