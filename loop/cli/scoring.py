"""The command `rescore`: another reward for rows that are stored."""

from typing import Annotated

import typer

from .app import ROWS, JsonOption, StoreOption, app, open_store
from .printing import counted, print_json, screen


@app.command(rich_help_panel=ROWS)
def rescore(
    reward: Annotated[
        str, typer.Option(metavar="NAME", help="A reward of ours, or package.module:function.")
    ],
    store: StoreOption = None,
    version: Annotated[
        str | None,
        typer.Option(help="What to call this state of it, else a digest of its source."),
    ] = None,
    where: Annotated[
        str | None, typer.Option(help="Which experiences, in SQL: \"run_id = 'a'\"; else all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Judge stored rows by a reward function; its verdicts are rows of `scores`.

    Rows that it has judged before are passed over, so a call that was killed is gone on with. A run
    trains on what it says when `trainer.with_columns` lists `reward=score:NAME@VERSION`.
    """
    from ...store.errors import JobError
    from ..rescoring import rescore as judge

    lake = open_store(store)
    with screen(stderr=True).status("judging") as shown:
        done = judge(
            lake,
            reward,
            version=version,
            where=where,
            listener=lambda n, all_: shown.update(f"judged {n:,} of {counted(all_, 'row')}"),
        )
    if done.rows and done.failed == done.rows:
        raise JobError(
            f"`{done.scorer}` could judge none of {counted(done.rows, 'row')}, such as: "
            f"{done.failure}; mend it and judge again, with another `--version` if you name them"
        )
    if as_json:
        print_json(vars(done))
        return
    before = f" ({done.rows - done.new:,} before)" if done.rows > done.new else ""
    print(f"{done.scorer}@{done.version} judged {counted(done.rows, 'row')}{before}")
    if not done.rows:
        return
    share = done.changed / done.rows
    print(
        f"against the stored reward: {done.changed:,} changed ({share:.1%}), "
        f"{done.better:,} higher, {done.worse:,} lower"
    )
    print(f"mean: {_mean(done.reward_mean)} stored, {_mean(done.value_mean)} now")
    if done.failed:
        print(f"could not be judged: {counted(done.failed, 'row')}, such as: {done.failure}")
    print(f"read it as `score:{done.scorer}@{done.version}`")


def _mean(value: float | None) -> str:
    return "NULL" if value is None else f"{value:.4g}"
