"""The real vLLM reads the images that the trainer does, and gives its log-probs."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parents[2] / "support"
TORCHVISION = Path(sys.prefix) / "torchvision"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm; `make .venv/.vllm`"),
    pytest.mark.skipif(
        find_spec("torchvision") is None and not TORCHVISION.is_dir(),
        reason="needs torchvision; `make .venv/.vllm`",
    ),
]


def answers(folder: Path, family: str) -> dict[str, Any]:
    """What `vision_on_vllm` finds; a torchvision for CUDA is made importable if need be."""
    paths = [] if find_spec("torchvision") else [SUPPORT / "torchvision_on_cpu", TORCHVISION]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    if paths:
        variables["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        [sys.executable, SUPPORT / "vision_on_vllm.py", folder, family],
        env=variables,
        capture_output=True,
        text=True,
        timeout=800,  # on a busy machine it starts for minutes
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.long)])
def test_log_probs_of_answers_about_images_are_those_of_the_trainer(
    tmp_path: Path, family: str
) -> None:
    found = answers(tmp_path, family)
    for version in ("0", "1"):  # the second replaced the first in the running vLLM
        given, compared = found[f"verified {version}"]
        assert given == compared > 50  # every tensor was read back, those of the images too
        # 8 and 6 tokens for two images; one alone; none; the second one again in a second turn
        assert found[f"images {version}"] == [14] * 4 + [6] * 2 + [0] * 2 + [20] * 2
        mean, largest, count = found[f"equal {version}"]
        assert count == 120
        assert mean < 1e-5
        assert largest < 1e-4
        mean, *_ = found[f"swapped {version}"]
        assert mean > 0.1  # the images of each other make other answers likely
