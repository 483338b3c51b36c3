"""The command `debug workflow`, and `show --tokens`: a try as people see it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.tiny_models import config

from rlake.loop.cli import run_command
from rlake.loop.cli.show import colored, legend, shade
from rlake.loop.run import run as run_both
from rlake.store import connect

Rlake = Callable[..., str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a short run, and its configuration beside it."""
    folder = tmp_path_factory.mktemp("debug")
    settings = config(trainer={"steps": 1})
    run_both(connect(folder / "lake"), settings)
    (folder / "demo.yaml").write_text(settings.model_dump_json(exclude_unset=True))
    return folder


def debug(place: Path, *args: str, code: int = 0) -> None:
    where = ["--store", str(place / "lake"), "--config", str(place / "demo.yaml")]
    assert run_command(["debug", "workflow", *args, *where]) == code


def test_a_try_shows_its_turns_tokens_rewards_and_row(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = connect(place / "lake")
    [(task_id, prompt)] = lake.sql("SELECT task_id, prompt_text FROM tasks LIMIT 1").fetchall()
    before = lake.versions()
    debug(place, "single_turn", "--task", task_id[:12])
    shown = capsys.readouterr().out
    for part in ("policy version 1", prompt, "turns", "rewards", "share_of_ones", "finish_reason"):
        assert part in shown
    assert lake.versions() == before  # nothing is stored


def test_json_is_the_row_that_would_be_stored(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    debug(place, "single_turn", "--ask", "1+1=", "--answer", "02", "--rollouts", "2", "--json")
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["policy"] == "version 1"
    assert [row["rollout_index"] for row in told["rows"]] == [0, 1]
    assert len(told["rows"][0]["token_ids"]) == told["rows"][0]["num_tokens"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["single_turn"], "name a task with `--task ID`"),
        (["single_turn", "--task", "zz"], "`zz` is not a task of this store"),
        (["single_trun", "--ask", "1"], "no workflow `single_trun`"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert run_command(["debug", "workflow", *args, "--store", str(place / "lake")]) == 2
    assert said in capsys.readouterr().err


def test_show_has_the_tokens_of_a_stored_row(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [(name,)] = connect(place / "lake").sql("SELECT min(experience_id) FROM experiences").fetchall()
    assert run_command(["show", name, "--tokens", "--store", str(place / "lake")]) == 0
    assert "tokens, by sampling probability" in capsys.readouterr().out


def test_what_was_sampled_has_the_colour_of_its_probability() -> None:
    text = colored(["1+1=", "2", "\n"], [False, True, True], [0.0, -0.01, -9.0])
    assert text.plain == "1+1=2⏎\n"
    assert [str(span.style) for span in text.spans] == ["dim", "green", "bold red"]
    assert shade(-0.5) == "cyan"
    assert "0.9" in legend().plain
    unknown = colored(["2"], [True], None)
    assert [str(span.style) for span in unknown.spans] == ["underline"]
