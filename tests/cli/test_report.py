"""`rlake report`: the command writes the page, and says where."""

import json
from pathlib import Path

from support.commands import Command
from support.histories import History

from rlake.store import Store


def test_report_writes_a_page_or_refuses_before_it_writes(
    rlake: Command, lake: Store, tmp_path: Path
) -> None:
    History(0, steps=5).write(lake)
    path = tmp_path / "r.html"
    done = rlake("report", "r", "--out", str(path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["report"] == str(path)
    assert "max_lag: 2" in path.read_text()  # of a configuration that is none of today's
    done = rlake("report", "r", "--out", str(path), "--quantiles", "0.1,0.9", "--json")
    assert done.returncode == 0, done.stderr
    assert path.read_text().count('class="sample"') == 2
    for given in ("0.5,x", "1.5", "nan"):
        wrong = rlake("report", "r", "--out", str(tmp_path / "x.html"), "--quantiles", given)
        assert wrong.returncode == 2
        assert f"numbers from 0 to 1 such as `0,0.5,1`, got `{given}`" in wrong.stderr
    wrong = rlake("report", "r", "--against", "rr", "--out", str(tmp_path / "x.html"))
    assert wrong.returncode == 2
    assert "did you mean `r`" in wrong.stderr
    assert not (tmp_path / "x.html").exists()
