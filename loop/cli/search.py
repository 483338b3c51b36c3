"""Commands that find experiences: search, similar, embed."""

from typing import TYPE_CHECKING, Annotated

import typer

from .app import ROWS, AtOption, JsonOption, StoreOption, app, open_store
from .tables import counted, print_json, print_rows, screen

if TYPE_CHECKING:
    import polars as pl


CountOption = Annotated[int, typer.Option("-k", min=1, max=1000, help="How many, the best first.")]
WhereOption = Annotated[
    str | None, typer.Option(help='Among which experiences, in SQL: "reward >= 1"; else all.')
]


@app.command(rich_help_panel=ROWS)
def search(
    text: Annotated[str, typer.Argument(help="Words, best matches first (BM25).")],
    store: StoreOption = None,
    k: CountOption = 10,
    where: WhereOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find experiences by the words of their responses."""
    found = open_store(store, at=at).search(text, k=k, where=where)
    _print_found(found, as_json=as_json)


@app.command(rich_help_panel=ROWS)
def similar(
    experience_id: Annotated[str, typer.Argument(metavar="ID", help="The experience.")],
    store: StoreOption = None,
    k: CountOption = 10,
    embedder: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose vectors, when several embedded.")
    ] = None,
    where: WhereOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find experiences whose responses are like that of another; `rlake embed` comes first."""
    found = open_store(store, at=at).similar(experience_id, k=k, embedder=embedder, where=where)
    _print_found(found, as_json=as_json)


@app.command(rich_help_panel=ROWS)
def embed(
    store: StoreOption = None,
    embedder: Annotated[
        str,
        typer.Option(metavar="NAME", help="hashed_ngrams, or package.module:function of texts."),
    ] = "hashed_ngrams",
    where: WhereOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store a vector of each response that has none yet by this embedder."""
    from ...pipelines.embed import embed as work

    lake = open_store(store)
    with screen(stderr=True).status("embedding") as shown:
        done = work(
            lake,
            embedder,
            where=where,
            listener=lambda n, all_: shown.update(f"embedded {n:,} of {counted(all_, 'response')}"),
        )
    if as_json:
        print_json({**vars(done), "store": lake.uri})
        return
    print(f"{done.embedder}: embedded {counted(done.rows, 'response')}, {done.already:,} before")
    if done.without_text:
        print(f"without text, and so without a vector: {counted(done.without_text, 'row')}")


def _print_found(found: "pl.DataFrame", *, as_json: bool) -> None:
    if as_json:
        print_json({"found": found.to_dicts()})
    elif found.is_empty():
        print("nothing found")
    else:
        print_rows(found.columns, found.rows())
