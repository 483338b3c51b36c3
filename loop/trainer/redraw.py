"""Draw a step's batch again, from the seed, the step, and the store as it was then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from ...pipelines.inline import STORED, apply_before_train, trainer_chain
from ...store import Store
from ...store.errors import NotFoundError, StoreError, reading
from ...store.query import literal
from ...store.replay import Draw
from ..algorithms import Algorithm, resolve
from ..config import RunConfig
from ..schedule.samplers import RowSampler, sampler
from ..schedule.units import UnitSchedule


@dataclass(frozen=True)
class Rebuilt:
    """Whether the sampler draws the same batch again."""

    run_id: str
    step: int
    is_same: bool
    detail: str
    """What differs, or why the batch cannot be drawn again."""

    def __str__(self) -> str:
        found = "drawn again: the same rows and weights" if self.is_same else f"NOT {self.detail}"
        return f"step {self.step} of `{self.run_id}`: {found}"


def rebuild(store: Store, run_id: str, step: int) -> Rebuilt:
    """Draw a step of a run again, and compare rows, order, sources and weights with `draws`.

    If rows cannot be read, the result says so. Raises NotFoundError if the run has no such step.
    """
    try:
        with reading("the rows that it was drawn from"):
            return _rebuild(store, run_id, step)
    except StoreError as error:
        return Rebuilt(run_id, step, is_same=False, detail=f"drawn again: {error}")


def _rebuild(store: Store, run_id: str, step: int) -> Rebuilt:
    where = f"run_id = {literal(run_id)}"
    drawn = store.sql(
        "SELECT experience_id, source, weight, drawn_from FROM draws_current "
        f"WHERE {where} AND step = {step} ORDER BY position"
    ).pl()
    if not drawn.height:
        raise NotFoundError(f"run `{run_id}` has no step {step} on record; see `steps`")
    if drawn["drawn_from"][0] is None:
        return Rebuilt(run_id, step, is_same=False, detail="on record: what it was drawn from")
    [(text, functions), *_] = store.sql(
        f"SELECT config, functions FROM job_events WHERE {where} AND job = 'train' "
        "ORDER BY created_at DESC"
    ).fetchall()
    config = RunConfig.model_validate_json(text)
    until = {table["name"]: table["version"] for table in drawn["drawn_from"][0]}
    algorithm = resolve(config.algorithm)
    again = sampler(store, config, algorithm, until=until)
    before = store.sql(
        "SELECT coalesce(preference_id, experience_id) AS id, source FROM draws_current "
        f"WHERE {where} AND step < {step} ORDER BY step, position"
    ).pl()
    again.restore(before["id"].to_list(), sources=before["source"].to_list())
    draw = again.draw(
        _units(store, drawn, algorithm),
        step=step,
        policy_version=step - 1,
        horizon=UnitSchedule(config).of(step),
    )
    if draw is None:
        return Rebuilt(run_id, step, is_same=False, detail="drawn again: rows are missing")
    rows = again.read(draw, ["experience_id"]).with_columns(
        source=pl.Series(list(draw.sources), dtype=pl.String), weight=pl.Series(draw.weights)
    )
    is_same, detail = _compare(rows.filter("allowed"), drawn)
    if is_same and config.trainer.operators:
        is_same, detail = _treat(config, functions, again, draw, drawn)
    return Rebuilt(run_id, step, is_same, detail)


def _units(store: Store, drawn: pl.DataFrame, algorithm: Algorithm) -> int:
    """Return how many units the rows of a step make up."""
    if algorithm.unit == "pair":
        return drawn.height // 2
    return _groups(store, drawn) if algorithm.grouped else drawn.height


def _groups(store: Store, drawn: pl.DataFrame) -> int:
    """Return how many groups the rows of a step make up, counting repeated draws."""
    rows = pl.DataFrame(
        pl.from_arrow(
            store.dataset("experiences").to_table(
                columns=["experience_id", "run_id", "group_id"],
                filter=f"experience_id IN ({', '.join(map(literal, drawn['experience_id']))})",
            )
        )
    )
    times = drawn["experience_id"].value_counts(name="times")
    each = rows.join(times, on="experience_id").group_by("run_id", "group_id")
    return int(each.agg(pl.col("times").max())["times"].sum())


def _treat(
    config: RunConfig,
    functions: Sequence[Mapping[str, str]] | None,
    again: RowSampler,
    draw: Draw,
    drawn: pl.DataFrame,
) -> tuple[bool, str]:
    """Return whether the operators drop only rows that had weight 0, and what differs."""
    algorithm = resolve(config.algorithm)
    credit = algorithm.advantage()
    chain = trainer_chain(
        config.trainer.operators,
        config.trainer.side_columns,
        credit=credit,
        grouped=algorithm.grouped,
    )
    then = {f["name"]: f["value"] for f in functions or ()}
    changed = [name for name, digest in chain.functions.items() if then.get(name) != digest]
    if changed:
        return False, f"treated by the same operators: `{changed[0]}` is another now"
    read = again.read(draw, ["experience_id", "group_id", *chain.reads(STORED)])
    rows, _ = apply_before_train(chain, again.with_sides(draw, read).drop("replaced"))
    weights = drawn.rename({"weight": "then"}).select("then")
    both = pl.concat([rows.filter("allowed"), weights], how="horizontal")
    wrong = both.filter(pl.col("left_out").is_not_null(), pl.col("then") != 0)
    if wrong.height:
        row = wrong.row(0, named=True)
        return False, f"the same: `{row['experience_id']}` was trained on, though {row['left_out']}"
    return True, ""


def _compare(rows: pl.DataFrame, drawn: pl.DataFrame) -> tuple[bool, str]:
    """Return whether two draws are the same, and where they first differ."""
    if rows.height != drawn.height:
        return False, f"the same: {rows.height} rows in place of {drawn.height}"
    for place, (now, then) in enumerate(
        zip(rows.iter_rows(named=True), drawn.iter_rows(named=True), strict=True)
    ):
        if (now["experience_id"], now["source"]) != (then["experience_id"], then["source"]):
            ids = now["experience_id"], then["experience_id"]
            return False, f"the same: at place {place} comes `{ids[0]}`, and came `{ids[1]}`"
        if then["weight"] not in (0.0, now["weight"]):  # rows that could not be trained on have 0
            weights = now["weight"], then["weight"]
            return (
                False,
                f"the same: `{now['experience_id']}` weighs {weights[0]}, not {weights[1]}",
            )
    return True, ""
