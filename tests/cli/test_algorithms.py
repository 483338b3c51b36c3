"""`rlake algorithms` says all about an algorithm, and its docstrings say all that it does."""

import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from support.losses import prepared, with_trained

from rlake.loop import cli
from rlake.loop.algorithms import names, resolve
from rlake.loop.cli.algorithms import describe
from rlake.loop.losses import PolicyGradient
from rlake.operators.resolve import public

PAPERLESS = {"sft", "cpt", "policy_gradient", "reinforce", "reward_model"}
"""Older than arXiv, or than any one paper."""


@pytest.mark.parametrize("width", [100, 200])
def test_the_table_has_a_line_for_each_with_its_paper(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.run_command(["algorithms"]) == 0
    [head, *lines] = capsys.readouterr().out.splitlines()
    assert head.split() == ["algorithm", "what", "it", "is", "draws", "needs", "arXiv"]
    assert [line.split()[0] for line in lines] == names()
    assert "2402.03300" in next(line for line in lines if line.startswith("grpo "))


def test_the_site_groups_every_algorithm_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "researchers.md").read_text()
    [table] = re.findall(r"^## Algorithms\n(.*?)\n\n[^|]", page, re.MULTILINE | re.DOTALL)
    assert sorted(re.findall(r"`(\w+)`", table)) == names()


def test_a_page_tells_paper_parameters_defaults_and_metrics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run_command(["algorithms", "grpo"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for said in (
        "Group Relative Policy Optimization (GRPO), arXiv:2402.03300.",
        "draws group of 8",
        "clip: 0.2 How far below 1 the ratio may push.",
        "clip_high: null How far above 1; None: as far as below.",
        "kl.coef: 0.0 Penalty per nat of divergence.",
        "train/clip_fraction the share of tokens whose ratio left the trusted range",
        "train/ratio the mean of pi/pi_old over trained tokens",
    ):
        assert said in told


def test_scripts_read_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["algorithms", "sft", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["unit"], told["group_size"], told["needs"]) == ("row", 1, [])
    weighting = next(p for p in told["parameters"] if p["name"] == "weighting")
    assert (weighting["type"], weighting["default"]) == ("none | probability", "none")
    assert cli.run_command(["algorithms", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["algorithms"]] == names()


def test_a_name_that_is_not_there_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run_command(["algorithms", "grop"]) == cli.MISUSED
    assert capsys.readouterr().err == (
        "error: algorithm `grop` does not exist; did you mean `grpo`?\n"
    )


def test_an_algorithm_of_a_user_has_a_page_too() -> None:
    found = describe("support.tiny_models:Reinforce")
    assert (found.unit, found.group_size) == ("group", 3)
    assert [p.name for p in found.parameters] == ["group_size", "scale"]


@pytest.mark.parametrize("name", names())
def test_every_parameter_is_explained_and_every_paper_named(name: str) -> None:
    found = describe(name)
    assert [p.name for p in found.parameters if not p.meaning] == []
    assert found.summary
    assert found.text
    assert bool(found.paper) != (name in PAPERLESS)


@pytest.mark.parametrize("name", names())
def test_every_metric_of_a_loss_is_explained_in_a_docstring(name: str) -> None:
    explained = set(describe(name).metrics)
    for params in ({}, everything(name)):
        algorithm = resolve({name: params})
        batch, new_BT = prepared(algorithm, 0)
        loss = algorithm.loss(with_trained(batch, new_BT), new_BT)
        assert set(loss.metrics) - explained == set()


def everything(name: str) -> dict[str, Any]:
    """Parameters with which an algorithm measures all that it can."""
    made = resolve(name)
    known = {f.name: getattr(made, f.name) for f in fields(made)}  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    if isinstance(made, PolicyGradient) and "kl" in known:
        found |= {"kl": {"coef": 0.1}, "entropy_coef": 0.1}
        found["correction"] = {"decoupled": True, "cap": 1.5, "mask_above": 3.0}
    if "over" in known:
        found["over"] = "sampled"
    if "dual_clip" in known:
        found |= {"dual_clip": 3.0, "sequence_mask": 0.1}
    assert all(not is_dataclass(known[k]) or isinstance(v, dict) for k, v in found.items())
    return found


def test_operators_are_listed_with_their_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["operators", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {name: one["kind"] for name, one in listed.items()} == {
        name: one.kind for name, one in public().items()
    }
    assert cli.run_command(["operators", "pairs"]) == 0
    page = capsys.readouterr().out
    assert "pairs (reshape)" in page
    assert "min_margin" in page
    assert cli.run_command(["operators", "pair"]) != 0
    assert "did you mean `pairs`" in capsys.readouterr().err


def test_parameters_of_workflows_are_listed_without_their_checks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run_command(["workflows", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["agent"]["parameters"]["function"] == "str"
    assert "Annotated" not in json.dumps(listed)
