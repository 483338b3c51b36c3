"""The part of the command export that writes a run's weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .tables import print_json

if TYPE_CHECKING:
    from ...store import Store

RunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="For model: the run.", show_default=False)
]
VersionOption = Annotated[
    int | None, typer.Option(help="For model: the policy version; the newest when left out.")
]
MergeOption = Annotated[
    bool,
    typer.Option(
        "--merge/--no-merge", help="For model: whether an adapter becomes part of its model."
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(help="For model: the run's folder, when its configuration has an `output`."),
]


def check_given(what: str, *, rows: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Refuse options of rows for weights, and the other way round, and weights of no run."""
    from ...store.errors import ConfigError

    of, others = ("rows", rows) if what == "model" else ("`model`", weights)
    for name, value in others.items():
        if value not in (None, False, [], ()):
            raise ConfigError(f"{name} is for {of}, and `{what}` was asked for; leave it out")
    if what == "model" and weights["RUN"] is None:
        raise ConfigError("whose weights? name the run: `rlake export model RUN --out FOLDER`")


def export_weights(
    lake: "Store",
    run: str | None,
    out: Path,
    *,
    version: int | None,
    merge: bool,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Write a run's weights to a new folder, and say what was written."""
    from ...store.errors import missing_extra

    try:
        from ..weight_sync.export import export_model
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "transformers", "train") from error
    assert run is not None, "`check_given` refuses weights of no run"
    done = export_model(lake, run, out, version=version, merge=merge, folder=folder)
    if as_json:
        print_json({"what": "model", "run": run, **vars(done), "out": str(out)})
        return
    kinds = {"merged": "its adapter merged into the model", "adapter": "an adapter"}
    print(
        f"wrote version {done.version} of {run} to {out}: {kinds.get(done.kind, 'a whole model')}"
    )
