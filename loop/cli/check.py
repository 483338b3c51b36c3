"""The command `check`: expectations of stored rows."""

from pathlib import Path
from typing import Annotated, Any

from ...store.errors import ConfigError, NotFoundError, nearest
from .app import CARE, AtOption, JsonOption, StoreOption, app, argument, open_store
from .tables import counted, print_json, print_rows

DEFAULT_FILE = "expectations.yaml"


@app.command(rich_help_panel=CARE)
def check(
    file: Annotated[
        Path, argument("Read `expect: {TABLE: [...]}` from this YAML file.", metavar="FILE")
    ] = Path(DEFAULT_FILE),
    store: StoreOption = None,
    at: AtOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check what is expected of stored rows; exit with 1 when an expectation fails.

    The file names tables or views, each with a list of expectations; a run's configuration is such
    a file, too. The results become rows of the table `expectations`, except with `--at`.
    """
    from ...pipelines import expectations
    from ...store.query import quoted

    expected = _expected(file)
    lake = open_store(store, at=at)
    known = _known(lake)
    for name in expected:
        if name not in known:
            raise NotFoundError(
                f"`{file}` expects something of `{name}`, which is neither a table nor a view"
                f"{nearest(name, known)}"
            )
    results: list[dict[str, Any]] = []
    for name, some in expected.items():
        # rows that were taken back are not expected to be anything
        current = f"{name}_current" if f"{name}_current" in known else name
        rows = f"SELECT * FROM {quoted(current)}"
        found = expectations.check(lake, some, f"table `{name}`", select=rows)
        results += [
            {
                "table": name,
                "expectation": str(one.expectation),
                "severity": one.expectation.severity,
                "passed": one.passed,
                "rows": one.num_rows,
                "failing": one.num_failing,
                "such_as": list(one.row_ids),
            }
            for one in found
        ]
    failed = [row for row in results if not row["passed"]]
    if as_json:
        print_json({"passed": not failed, "results": results})
    else:
        print_rows(list(results[0]), [list(row.values()) for row in results])
        print(f"{counted(len(results), 'expectation')} checked, {len(failed)} failed")
    return int(any(row["severity"] == "error" for row in failed))


def _expected(file: Path) -> dict[str, Any]:
    from ...pipelines import expectations
    from ...store.files.yaml_text import parse_yaml, read_text

    tree = parse_yaml(read_text(file), f"`{file}`")
    given = tree.get("expect") if isinstance(tree, dict) else None
    if not isinstance(given, dict) or not any(given.values()):
        raise ConfigError(
            f"`{file}` has no expectations; write `expect: {{experiences: [{{not_null: reward}}]}}`"
        )
    if "source" in tree and "operators" in tree:
        raise ConfigError(
            f"`{file}` is a pipeline, which checks its rows itself: `rlake pipeline run {file}`"
        )
    return {n: expectations.build(some or (), f"expect.{n}") for n, some in given.items() if some}


def _known(lake: Any) -> list[str]:
    from ...store.schema import TABLES
    from .stored_tables import VIEWS

    return [*TABLES, *VIEWS, *lake.user_versions()]
