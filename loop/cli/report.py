"""The command `report`."""

from pathlib import Path
from typing import Annotated

from .app import PROOF, AtOption, JsonOption, StoreOption, app, argument, heavy, open_store, option
from .tables import render


@app.command(rich_help_panel=PROOF)
def report(
    run: Annotated[str, argument("Report on this run.", metavar="RUN")],
    against: Annotated[
        str | None, option("Compare it with this run.", "--against", metavar="RUN")
    ] = None,
    out: Annotated[Path, option("Write the page to this file.", "--out", "-o")] = Path(
        "report.html"
    ),
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run's summary, curves, samples, failures and lineage into one HTML file."""
    lake = open_store(store, at=at)
    # it needs matplotlib and jinja2, which a store alone does not
    made = heavy("report.page").write_report(lake, out, run, against)
    render(made.summaries[0] | {"report": str(out)}, as_json=as_json)
