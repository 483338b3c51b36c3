"""The command `evaluate`: versions of a run, models, or two of them compared."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import JOBS, JsonOption, StoreOption, app, heavy, opened, option
from .run import ConfigArgument, SetOption, StageOption, configured
from .tables import counted, print_fields, print_heading, print_json, print_rows

if TYPE_CHECKING:
    from ..config import RunConfig
    from ..evaluation.estimates import Estimate
    from ..evaluation.evaluate import Comparison, Evaluation
    from ..evaluation.paired_test import PairedTest


@app.command(rich_help_panel=JOBS)
def evaluate(
    config: ConfigArgument,
    store: StoreOption = None,
    overrides: SetOption = None,
    stage: StageOption = None,
    version: Annotated[
        int | None, option("Evaluate this policy version.", default="the newest")
    ] = None,
    every_checkpoint: Annotated[
        bool, option("Evaluate every version whose weights still exist.", "--every-checkpoint")
    ] = False,
    model: Annotated[
        list[str] | None,
        option("Evaluate this model folder instead of the run's policy; repeatable."),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        option("Compare two versions or model folders, task by task.", metavar="A B"),
    ] = None,
    k: Annotated[
        str | None, option("Report pass@k and best@k for these k.", metavar="1,4,8")
    ] = None,
    where: Annotated[
        str | None,
        option(
            "Evaluate on the tasks that match this SQL condition.",
            metavar="SQL",
            default="`evaluate.where`",
        ),
    ] = None,
    engine: Annotated[
        str | None, option("Sample with this engine: transformers or vllm.", metavar="NAME")
    ] = None,
    rerun: Annotated[
        bool, option("Evaluate again what was evaluated before in the same way.", "--rerun")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate policies on the tasks of `evaluate.where`; every rollout becomes a row.

    Versions that were evaluated before with the same weights, tasks and settings are not evaluated
    again. Intervals are 95 %: Wilson's with one rollout per task, else a bootstrap over tasks. Two
    policies are compared by a paired permutation test and, where it applies, McNemar's test.
    """
    _only_one(version, every_checkpoint, model, compare)
    settings = configured(config, overrides, stage)
    settings = _changed(settings, k=k, where=where, engine=engine)
    # digits are a version; a folder of that name is `./7`
    both = [int(one) if one.isdecimal() else one for one in compare or ()]
    has_model = bool(model) or any(isinstance(one, str) for one in both)
    lake = opened(settings, store, "evaluate", create=has_model)
    work = heavy("evaluation.evaluate")
    if both:
        a, b = both
        _show_comparison(work.compare(lake, settings, a, b, rerun=rerun), lake.uri, as_json)
        return
    if every_checkpoint:
        found = work.evaluate_checkpoints(lake, settings, rerun=rerun)
    else:
        those = [{"model": one} for one in model or ()] or [{"version": version}]
        found = [work.evaluate(lake, settings, rerun=rerun, **one) for one in those]
    _show(found, lake.uri, as_json)


def _only_one(*given: object) -> None:
    if sum(bool(one) or one == 0 for one in given if one is not False) > 1:
        raise typer.BadParameter(
            "give only one of --version, --every-checkpoint, --model and --compare"
        )


def _changed(
    settings: "RunConfig", *, k: str | None, where: str | None, engine: str | None
) -> "RunConfig":
    """Return the configuration with the options in its section `evaluate`."""
    from ..config import build

    given = {"pass_at": k.split(",") if k else None, "where": where, "engine": engine}
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        return settings
    # built again, so that the options are checked like the file
    tree = settings.plain()
    tree["evaluate"] = {**(tree["evaluate"] or {}), **changes}
    return build(tree)


def _show(found: "list[Evaluation]", place: str, as_json: bool) -> None:
    if not as_json:
        _print(found)
    elif len(found) == 1:
        print_json({**asdict(found[0]), "store": place})
    else:
        print_json({"evaluations": [asdict(one) for one in found], "store": place})


def _show_comparison(found: "Comparison", place: str, as_json: bool) -> None:
    both = [found.a, found.b]
    if as_json:
        plain = [asdict(one) for one in both]
        print_json({"evaluations": plain, "comparison": asdict(found.paired), "store": place})
        return
    _print(both)
    a, b = map(_label, both)
    print_heading(f"{b} against {a}, on {counted(found.paired.num_tasks, 'task')}")
    print_fields(_compared(found.paired, a, b))


def _compared(paired: "PairedTest", a: str, b: str) -> dict[str, Any]:
    message: dict[str, Any] = {
        "mean reward": f"{paired.difference:+.4f}{_bounds(paired.low, paired.high)}",
        "p, paired permutation test": f"{paired.p_value:.4g}",
        "accuracy": f"{paired.accuracy_difference:+.4f}",
    }
    if paired.mcnemar_p is not None:
        message[f"only {b} correct"] = paired.only_b
        message[f"only {a} correct"] = paired.only_a
        message["p, McNemar's exact test"] = f"{paired.mcnemar_p:.4g}"
    if paired.num_left_out:
        message["tasks left out"] = paired.num_left_out
    return message


def _print(found: "list[Evaluation]") -> None:
    names = [one.name for one in found[0].estimates]
    rows = [
        (
            _label(one),
            one.num_tasks,
            *(_cell(estimate) for estimate in one.estimates),
            one.num_unscored,
            one.run_id + (" (before)" if one.is_from_before else ""),
        )
        for one in found
    ]
    print_rows(["policy", "tasks", *names, "unscored", "rows"], rows)


def _label(one: "Evaluation") -> str:
    return one.model or f"version {one.policy_version}"


def _cell(one: "Estimate") -> str | None:
    if one.num_tasks == 0:
        return None
    return f"{one.value:.4g}{_bounds(one.low, one.high)}"


def _bounds(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:.3g}, {high:.3g}]"
