"""Commands that take back what an import or a pipeline run added: undo, redo."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .app import ROWS, JsonOption, StoreOption, app, open_store
from .tables import counted, print_json

if TYPE_CHECKING:
    from ...store.undo import Undone

LineageArgument = Annotated[
    str,
    typer.Argument(
        metavar="LINEAGE_ID", help="The import or pipeline run, as it said or `lineage` tells."
    ),
]


@app.command(rich_help_panel=ROWS)
def undo(
    lineage_id: LineageArgument, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Take back what one import or pipeline run added, and put back what it had replaced.

    Nothing is deleted: its rows stay in the tables, and do not count in the views that end in
    `_current`, in `groups`, draws, exports, searches and pipelines. `redo` puts it back.
    """
    from ...store.undo import undo as take_back

    lake = open_store(store)
    _say(take_back(lake, lineage_id), "took back", "put back", as_json=as_json)


@app.command(rich_help_panel=ROWS)
def redo(
    lineage_id: LineageArgument, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Put back what `undo` took back, or what another import or run replaced."""
    from ...store.undo import redo as put_back

    lake = open_store(store)
    _say(put_back(lake, lineage_id), "put back", "took back", as_json=as_json)


def _say(done: "Undone", did: str, otherwise: str, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
        return
    rows = ", ".join(f"{n:,} of {table}" for table, n in done.rows.items()) or "no row"
    print(f"{did} `{done.name}` ({done.lineage_id}): {rows}")
    for table, n in done.shared.items():
        print(f"{counted(n, 'row')} of {table} still count: another gave them too")
    for other in done.others:
        print(f"{otherwise}: {other}")
    if done.num_drawn:
        trained = f"{counted(done.num_drawn, 'experience')} of these were trained on before"
        print(f"{trained}; steps on record stay as they are")
