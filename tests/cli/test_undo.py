"""Taking back what was imported, on the command line."""

from pathlib import Path

from support.commands import Command

from rlake.store import Task, connect

TASK = Task.ask("2+2=", "4").task_id


def test_the_command_says_how_many_values_and_how_to_take_them_back(
    rlake: Command, tmp_path: Path
) -> None:
    store = connect(tmp_path / "lake")
    store.append("tasks", [Task.ask("2+2=", "4")])
    (tmp_path / "levels.csv").write_text(f"task_id,level\n{TASK},3\n")
    where = ("--store", store.uri)
    said = rlake("import", "values", tmp_path / "levels.csv", "--name", "difficulty", *where)
    assert said.stdout.startswith("imported 1 value from ")
    lineage_id = said.stdout.partition("`rlake undo ")[2].partition("`")[0]
    done = rlake("undo", lineage_id, *where)
    assert done.stdout == f"undid `levels.csv` ({lineage_id}): 1 of task_values\n"
    assert rlake("redo", lineage_id, *where).stdout.startswith("restored `levels.csv`")
    wrong = rlake("import", "tasks", tmp_path / "levels.csv", "--name", "x", *where)
    assert (wrong.returncode, "`--name` is only for `values`" in wrong.stderr) == (2, True)
