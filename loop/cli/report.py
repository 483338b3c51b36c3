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
    quantiles: Annotated[
        str | None,
        option(
            "Show samples at these quantiles of the reward.",
            "--quantiles",
            metavar="Q,Q",
            default="0,0.25,0.5,0.75,1",
        ),
    ] = None,
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run's summary, curves, samples, failures and lineage into one HTML file."""
    lake = open_store(store, at=at)
    chosen = heavy("report.details").parse_quantiles(quantiles) if quantiles else None
    # it needs matplotlib and jinja2, which a store alone does not
    page = heavy("report.page")
    made = page.write_report(lake, out, run, against, quantiles=chosen or page.QUANTILES)
    render(made.summaries[0] | {"report": str(out)}, as_json=as_json)
