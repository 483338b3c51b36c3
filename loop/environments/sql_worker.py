"""The program that runs queries for `sql` within limits; it is run as a file.

It reads JSON lines and answers each with one: `{"setup": text}` creates the tables; after that,
`{"query": text, "rows": n}` is answered with `columns`, `rows` and `more`, or with `error`.
"""

import json
import resource
import sys
from typing import Any

_CLOSED = """
SET python_enable_replacements = false;
SET enable_external_access = false;
"""
_LONGEST = 2000
"""Most characters of a cell, and of an error."""


def main() -> None:
    """Answer requests until the end of the input."""
    limits = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu"], limits["cpu"]))
    # no file at all: a query that needs more memory ends, instead of filling the disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # after the limits, which then hold for its threads and its memory as well
    import duckdb

    con = duckdb.connect(
        ":memory:",
        config={
            "threads": 1,
            "memory_limit": f"{limits['memory'] // 4}B",
            "temp_directory": "",
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        },
    )
    con.execute(_CLOSED)
    for line in sys.stdin:
        print(json.dumps(_answer(con, json.loads(line)), default=str), flush=True)  # noqa: T201


def _answer(con: Any, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        if "setup" in asked:
            con.execute(asked["setup"])
            con.execute("SET lock_configuration = true")  # so that no query lifts the limits
            return {}
        kinds = [statement.type.name for statement in con.extract_statements(asked["query"])]
        if kinds != ["SELECT"]:
            return {"error": f"expected one SELECT, got {' then '.join(kinds) or 'nothing'}"}
        found = con.execute(asked["query"])
        columns = [column[0] for column in found.description]
        rows = found.fetchmany(asked["rows"] + 1)
        more = len(rows) > asked["rows"]
        cells = [[_cell(value) for value in row] for row in rows[: asked["rows"]]]
        return {"columns": columns, "rows": cells, "more": more}
    except MemoryError:
        return {"error": "the query needs more memory than it may have"}
    except Exception as error:  # noqa: BLE001 - errors of a query are its answer
        return {"error": str(error)[:_LONGEST]}


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)[:_LONGEST]


if __name__ == "__main__":
    main()
