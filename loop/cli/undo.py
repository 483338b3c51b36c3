"""The commands `undo` and `redo` of imports and pipeline runs."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from .app import ROWS, JsonOption, StoreOption, app, argument, open_store
from .tables import counted, print_json

if TYPE_CHECKING:
    from ...store.undo import Undone

LineageArgument = Annotated[
    str,
    argument(
        "Name the import or pipeline run by the lineage ID that it printed.", metavar="LINEAGE_ID"
    ),
]


@app.command(rich_help_panel=ROWS)
def undo(
    lineage_id: LineageArgument, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Undo one import or pipeline run, and restore what it replaced.

    Nothing is deleted: the rows stay in the tables, but no longer count in `groups`, in the views
    that end in `_current`, or in draws, exports, searches and pipelines. `redo` brings them back.
    """
    from ...store.undo import undo as take_back

    lake = open_store(store)
    _say(take_back(lake, lineage_id), "undid", "restored", as_json=as_json)


@app.command(rich_help_panel=ROWS)
def redo(
    lineage_id: LineageArgument, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Bring back what `undo` removed, or what another import or run replaced."""
    from ...store.undo import redo as put_back

    lake = open_store(store)
    _say(put_back(lake, lineage_id), "restored", "undid", as_json=as_json)


def _say(done: "Undone", did: str, otherwise: str, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
        return
    rows = ", ".join(f"{n:,} of {table}" for table, n in done.rows.items()) or "no row"
    print(f"{did} `{done.name}` ({done.lineage_id}): {rows}")
    for table, n in done.shared.items():
        print(f"{counted(n, 'row')} of {table} still count: another import or run added them too")
    for other in done.others:
        print(f"{otherwise}: {other}")
    if done.num_drawn:
        trained = f"{counted(done.num_drawn, 'experience')} of these were trained on already"
        print(f"{trained}; recorded steps are unchanged")
