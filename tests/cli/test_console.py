"""The console of `rlake sql`: scripts, commands with a dot, and a person in a terminal."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pyarrow.parquet as pq
import pytest
from pexpect.fdpexpect import fdspawn
from support.commands import Command, refused

from rlake.loop.cli.completion import candidates
from rlake.loop.cli.console import split
from rlake.store import Store, Task
from rlake.store.schema import TABLES

UP, TAB, CTRL_C = "\x1b[A", "\t", "\x03"


def test_statements_end_at_semicolons_outside_of_texts_and_comments() -> None:
    assert split("SELECT 'é;' -- ;\n; SELECT 2; ;") == (["SELECT 'é;' -- ;\n;", " SELECT 2;"], "")
    assert split("SELECT $$;$$ /* ; */ ") == ([], "SELECT $$;$$ /* ; */ ")
    assert split("SELECT ';") == ([], "SELECT ';")


def test_a_script_runs_statements_and_commands_in_order(
    rlake: Command, lake: Store, tmp_path: Path
) -> None:
    lake.snapshot("one")
    lake.append("tasks", [Task.ask("3|3=", "6")])
    (tmp_path / "inner.sql").write_text("SELECT 'inner' AS place")
    script = """
        -- what there is
        SELECT count(*) AS n
        FROM tasks;  SELECT 2 AS two;
.mode markdown
        SELECT prompt_text, 1.5 AS x, NULL AS y FROM tasks WHERE answer = '6';
.at one
.mode line
        SELECT count(*) AS n, 'a' AS name FROM tasks;
.at now
.read inner.sql
.output rows.parquet
.mode parquet
        FROM tasks ORDER BY answer;
.output rows.json
.mode json
        SELECT 1 AS n; SELECT 2 AS n;
.output
.mode csv
        SELECT 3 AS n
"""
    said = rlake("sql", stdin=script)
    assert said.returncode == 0, said.stderr
    text = said.stdout
    for part in (
        "n\n2\n(1 row)\ntwo\n  2\n(1 row)\n",
        "| prompt_text | x | y |\n|---|---:|---|\n| 3\\|3= | 1.5 | NULL |\n",
        "   n = 1\nname = a\n\n",
        "place = inner\n\n",
    ):
        assert part in text
        text = text.partition(part)[2]
    assert text == "n\n3\n"
    assert pq.read_table(tmp_path / "rows.parquet").column("answer").to_pylist() == ["4", "6"]
    ones, twos = (tmp_path / "rows.json").read_text().split("]\n[")
    assert (json.loads(f"{ones}]"), json.loads(f"[{twos}")) == ([{"n": 1}], [{"n": 2}])


def test_commands_describe_and_limit(rlake: Command, lake: Store) -> None:
    said = rlake("sql", stdin=".tables\n.schema groups\n.help\n.timer on\n.rows 1\nFROM range(3);")
    assert said.returncode == 0, said.stderr
    for words in ("groups", "pass_rate", ".timeout SECONDS|off", "Run time: ", "(first 1 row; "):
        assert words in said.stdout


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (".mod csv", "no command `.mod`; did you mean `.mode`?"),
        (".mode cvs", "no mode `cvs`; did you mean `csv`?"),
        (".mode csv json", "`.mode` takes `[MODE]`"),
        (".schema", "`.schema` takes `TABLE`"),
        (".schema task", "did you mean `tasks`?"),
        (".timer maybe", "`.timer` takes `on` or `off`"),
        (".rows none", "takes a number of at least 1"),
        (".at nowhere", "nowhere"),
        (".read nosuch.sql", "cannot read `nosuch.sql`"),
        (".read 'x", "cannot be read"),
        (".mode parquet\n.output x.parquet\nSELECT 1; SELECT 2;", "has one result"),
        ("-- nothing\n", "no query"),
        ("DROP VIEW groups;", "the store is read with one SELECT, got DROP"),
    ],
)
def test_an_error_ends_a_script(rlake: Command, lake: Store, script: str, words: str) -> None:
    refused(rlake("sql", stdin=script), words)


def test_files_that_read_each_other_end(rlake: Command, lake: Store, tmp_path: Path) -> None:
    (tmp_path / "loop.sql").write_text(".read loop.sql")
    refused(rlake("sql", "-f", "loop.sql"), "read each other")


def test_a_slow_query_of_a_script_ends_at_its_time(rlake: Command, lake: Store) -> None:
    slow = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b;"
    refused(rlake("sql", stdin=f".timeout 0.05\n{slow}"), "took longer", code=1)


def test_words_are_completed_by_what_the_statement_names() -> None:
    def columns(name: str) -> list[str]:
        return list(TABLES[name].names) if name in TABLES else ["pass_rate"]

    def offered(text: str) -> list[str]:
        return candidates(text, text.replace(";", " ").split(" ")[-1], columns)

    assert offered("SELECT promp") == ["prompt_length", "prompt_text"]
    assert "pass_rate" in offered("FROM groups SELECT pass")
    assert "prompt_text" not in offered("FROM groups SELECT promp")
    assert offered("SELECT tasks.ans") == ["tasks.answer"]
    assert "experiences" in offered("FROM exp")
    assert "pass_at_k" in offered("SELECT pass_a")
    assert "SELECT" in offered("SEL")
    assert "select" in offered("sel")
    assert "list_transform" in offered("SELECT list_tr")
    assert offered(".mo") == [".mode"]
    assert offered(".mode js") == ["json", "jsonl"]
    assert offered(".schema embed") == ["embeddings"]
    assert offered("SELECT ") == []


# Its process leads a session of its own on the terminal, as one that a shell starts. pexpect's own
# start would fork this process, which Lance's threads do not survive.
LEAD = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture
def terminal(
    lake: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator["fdspawn[str]"]:
    """Return a console in a terminal, at its prompt, which remembers one line."""
    history = tmp_path / "state" / "rlake" / "sql_history"
    history.parent.mkdir(parents=True)
    history.write_text("SELECT 'remem' || 'bered' AS text;\n")
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "dumb"}
    ours, its = os.openpty()
    command = [sys.executable, "-c", LEAD, "-m", "rlake.loop.cli", "sql", "--store", lake.uri]
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=env) as process:
        os.close(its)
        child = fdspawn(ours, encoding="utf-8", timeout=30)
        try:
            child.expect_exact("rlake> ")
            yield child
            process.wait(30)
        finally:
            process.kill()
            child.close()
    assert process.returncode == 0
    assert "FROM tasks WHERE prompt_text = '2+2=';" in history.read_text()


def test_a_person_edits_completes_cancels_and_leaves(terminal: "fdspawn[str]") -> None:
    def say(text: str, *heard: str) -> None:
        terminal.sendline(text)
        for words in (*heard, "> "):
            terminal.expect_exact(words)

    terminal.send(UP)  # the history of an earlier console
    say("", "remembered")
    say("SELECT answer", "...")
    say(f"FROM tasks WHERE prompt_t{TAB} = '2+2=';", "WHERE prompt_text = ", "4")
    say("SELECT nosuch FROM tasks;", "error: ", "nosuch")  # and the console goes on
    # what is shown says that the console is at work, so that the key finds it there
    slow = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b"
    terminal.sendline(f"SELECT 'be' || 'gun' AS text; {slow};")
    terminal.expect_exact("begun")
    terminal.send(CTRL_C)
    terminal.expect_exact("cancelled")
    terminal.expect_exact("rlake> ")
    say("SELECT 41 + 1 AS n;", "42")
    say("SELECT 'half", "...")
    terminal.send(CTRL_C)  # drops the statement
    terminal.expect_exact("rlake> ")
    terminal.send(CTRL_C)
    terminal.expect_exact("Ctrl-C again")
    terminal.expect_exact("rlake> ")
    terminal.send(CTRL_C)
    terminal.expect(pexpect.EOF)
