"""The tokens of a rollout, colored by what is known of each."""

from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui
from nicegui.element import Element

from ...store.errors import RlakeError
from ...store.query import literal
from .frame import View
from .widgets import heading, text

MOST = 4000
"""Most tokens that are shown."""
_MODES = {
    "logprobs": ("log-prob", -4.0, 0.0),
    "advantage": ("advantage", -2.0, 2.0),
    "teacher_logprobs": ("teacher's log-prob", -4.0, 0.0),
    "difference": ("log-prob less the teacher's", -2.0, 2.0),
    "token_rewards": ("reward of the token", -1.0, 1.0),
}
"""What tokens are colored by: name, and the values of the deepest red and green."""


class Tokens(Element, component="tokens.js"):
    """Pieces of text with a color for each value; those without a value were given."""

    def __init__(self, pieces: Sequence[str]) -> None:
        super().__init__()
        self.props["pieces"] = list(pieces)
        self.color([None] * len(pieces), 0.0, 1.0)

    def color(self, values: Sequence[float | None], low: float, high: float) -> None:
        """Color the pieces by these values."""
        self.props.update({"values": list(values), "low": low, "high": high})
        self.update()


async def show_tokens(view: View, experience_id: str) -> None:
    """Show the tokens of a rollout, if it has any; `color` says by what.

    Raises NotFoundError for a rollout that is not stored, or no longer.
    """
    key = literal(experience_id)
    parts = ", ".join(
        f"{name}[:{MOST}] AS {name}"
        for name in ("token_ids", "loss_mask", "logprobs", "teacher_logprobs", "token_rewards")
    )
    row = await view.one(
        f"SELECT {parts}, num_tokens, tokenizer, coalesce(advantage, (SELECT "
        f"arg_max(d.advantage, d.created_at) FROM draws d WHERE d.experience_id = {key})) "
        f"AS advantage FROM experiences WHERE experience_id = {key}",
        absent=f"rollout `{experience_id}` is no longer in this store; see the page Rollouts",
    )
    heading("Tokens")
    if not row["token_ids"]:
        ui.label("It is a row of text, without tokens.").classes("soft")
        return
    by = {name: values for name in _MODES if (values := _values(row, name)) is not None}
    names = {name: _MODES[name][0] for name in by}
    chosen = view["color"] if view["color"] in by else next(iter(by), None)
    chooser, legend, place = (ui.element("div") for _ in range(3))
    legend.classes("legend")
    shown: list[Tokens] = []

    def color(name: str) -> None:
        view.remember(color=name)
        legend.clear()
        _, low, high = _MODES[name]
        with legend:
            text("span", f"{low:g}")
            ui.element("i").style(
                "background: linear-gradient(90deg, hsl(4 65% 50% / .45), transparent, "
                "hsl(145 65% 50% / .45))"
            )
            text("span", f"{high:g}; gray tokens were given, not sampled")
        for made in shown:
            made.color(by[name], low, high)

    with chooser:
        made = ui.radio(names, value=chosen, on_change=lambda event: color(event.value))
        made.props("inline dense")
    try:
        pieces = await view.call(_pieces, view, row)
    except RlakeError as error:  # without the extra `train` no tokenizer can be loaded
        ui.label(f"shown by their numbers: {error}").classes("soft")
        pieces = [f"{token} " for token in row["token_ids"]]
    with place:
        shown.append(Tokens(pieces))
    if chosen is not None:
        color(chosen)
    if row["num_tokens"] and row["num_tokens"] > MOST:
        more = f"{row['num_tokens'] - MOST:,} more tokens; the SQL below gives them"
        ui.label(more).classes("soft")


def _pieces(view: View, row: Mapping[str, Any]) -> list[str]:
    from ..evaluation.debug import pieces, tokenizer_of

    return pieces(row["token_ids"], tokenizer_of(view.store, row))


def _values(row: Mapping[str, Any], name: str) -> list[float | None] | None:
    """Return the value of each token, None for given ones; None where the row has no values."""
    mask = row["loss_mask"] or [True] * len(row["token_ids"])
    if name == "advantage":
        values: Any = None if row[name] is None else [row[name]] * len(mask)
    elif name == "difference":
        mine, its = row["logprobs"], row["teacher_logprobs"]
        both = None if mine is None or its is None else zip(mine, its, strict=True)
        values = both and [None if None in pair else pair[0] - pair[1] for pair in both]
    else:
        values = row[name]
    if values is None:
        return None
    return [value if sampled else None for value, sampled in zip(values, mask, strict=True)]
