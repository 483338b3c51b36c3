"""The commands `search`, `similar` and `embed`."""

from typing import Annotated

from .app import (
    ROWS,
    AtOption,
    JsonOption,
    StoreOption,
    WhereOption,
    app,
    argument,
    open_store,
    option,
)
from .tables import counted, print_json, render, screen

CountOption = Annotated[
    int, option("Return at most this many, best matches first.", "-k", min=1, max=1000)
]


@app.command(rich_help_panel=ROWS)
def search(
    text: Annotated[str, argument("Search responses for these words (BM25).")],
    store: StoreOption = None,
    k: CountOption = 10,
    where: WhereOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find experiences by the words of their responses."""
    found = open_store(store, at=at).search(text, k=k, where=where)
    render({"found": found.to_dicts()}, found.to_dicts() or "nothing found", as_json=as_json)


@app.command(rich_help_panel=ROWS)
def similar(
    experience_id: Annotated[str, argument("Use the experience with this ID.", metavar="ID")],
    store: StoreOption = None,
    k: CountOption = 10,
    embedder: Annotated[
        str | None,
        option(
            "Compare the vectors of this embedder; needed where there are several.", metavar="NAME"
        ),
    ] = None,
    where: WhereOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find experiences with similar responses; run `rlake embed` first."""
    found = open_store(store, at=at).similar(experience_id, k=k, embedder=embedder, where=where)
    render({"found": found.to_dicts()}, found.to_dicts() or "nothing found", as_json=as_json)


@app.command(rich_help_panel=ROWS)
def embed(
    store: StoreOption = None,
    embedder: Annotated[
        str,
        option(
            "Embed with hashed_ngrams, or with package.module:function, which takes texts.",
            metavar="NAME",
        ),
    ] = "hashed_ngrams",
    where: WhereOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store a vector of each response that this embedder has not embedded yet."""
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
