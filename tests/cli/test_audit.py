"""`rlake audit`: the command prints findings, facts and tables, or one JSON object."""

import json
import re

import pytest
from support.commands import Command
from support.histories import History

from rlake.store import Store


def test_bias_and_drop_print_sentences_or_json(rlake: Command, lake: Store) -> None:
    history = History(0, steps=8)
    history.change(lambda r: r["num_tokens"] > 50, drop_reason="max_length: too long")
    history.write(lake)
    done = rlake("audit", "bias", "--run", "r")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("- length ")
    assert "dropped by max_length" in done.stdout
    told = json.loads(rlake("audit", "bias", "--run", "r", "--json").stdout)
    assert set(told) >= {"findings", "facts", "bins", "outcomes"}
    assert told["findings"]
    ranges = ("--run", "r", "--steps", "5:8", "--against", "1:4")
    done = rlake("audit", "drop", *ranges)
    assert done.stdout.startswith("the change is within chance"), done.stderr
    found = json.loads(rlake("audit", "drop", *ranges, "--json").stdout)
    splits = found["splits"]
    assert found["p"] > 1e-3
    lines = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    [heads] = [line for line in lines if line[0] == "dimension"]
    [part] = [dict(zip(heads, line, strict=True)) for line in lines if line[0] == "part"]
    [found] = [row for row in splits if row["dimension"] == "part"]
    assert (part["rows_before"], part["mix"]) == ("NULL", "NULL")
    assert float(part["change"]) == pytest.approx(found["change"], rel=1e-4)
    wrong = rlake("audit", "bias", "--run", "rr")
    assert wrong.returncode == 2
    assert "did you mean `r`" in wrong.stderr
    wrong = rlake("audit", "drop", "--run", "r", "--steps", "x", "--against", "1:4")
    assert wrong.returncode == 2
    assert "`--steps` must be two steps" in wrong.stderr


def test_oddities_and_off_policy_print_sentences_or_json(rlake: Command, lake: Store) -> None:
    history = History(0, steps=8)
    history.change(lambda r: r["batch"] > 4, response_text="The answer is obviously right.")
    history.write(lake)
    done = rlake("audit", "oddities", "--run", "r")
    assert done.stdout.startswith("- repeated text ("), done.stderr
    assert json.loads(rlake("audit", "oddities", "--run", "r", "--json").stdout)["findings"]
    done = rlake("audit", "off-policy", "--run", "r", "--weight", "num_tokens < 50")
    assert done.returncode == 0, done.stderr
    assert "it would have earned" in done.stdout
    few = ("--run", "r", "--weight", "num_tokens < 50", "--where", "batch = 1")
    done = rlake("audit", "off-policy", *few)
    assert done.returncode == 1
    assert "not estimated: 64 rows are worth" in done.stdout
    told = json.loads(rlake("audit", "off-policy", *few, "--json").stdout)
    assert [value["name"] for value in told["values"]] == ["logged"]
    history = History(1, steps=2, run_id="b")
    few_tokens = {"token_ids": [1, 1], "loss_mask": [False, True], "logprobs": [0.0, -0.5]}
    history.change(lambda _: True, num_tokens=2, **few_tokens)
    history.write(lake)
    done = rlake("audit", "value", "--run", "b", "--against", "r")
    assert done.stdout.startswith("no kind of rows moved the policy more"), done.stderr
    told = json.loads(rlake("audit", "value", "--run", "b", "--json").stdout)
    assert told["num_draws"] == 128
    wrong = rlake("audit", "off-policy", "--run", "r")
    assert wrong.returncode == 2
    assert "give either `target` or `weight`" in wrong.stderr
