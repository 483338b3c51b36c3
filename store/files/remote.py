"""Sources that are no files: databases and dataset hubs, copied to a file before anything is read.

The copy is complete before the first row is imported, so a database that goes away leaves nothing.
"""

import re
from collections.abc import Iterable
from contextlib import closing
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa

from ..errors import ConfigError, InputError, missing_extra, nearest
from ..query import quoted
from .duckdb_input import InputFile

SOURCES = {
    "postgresql": "postgresql://USER:PASSWORD@HOST/DATABASE#TABLE",
    "sqlite": "sqlite:///FILE#TABLE",
    "hf": "hf://OWNER/NAME#CONFIG",
    "modelscope": "modelscope://OWNER/NAME#CONFIG",
}
"""Addresses of sources by scheme; a SELECT may stand in place of a table."""
_NO_USERS = {"sqlite", "hf", "modelscope"}
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_USER = r"(\S*)@"
_UNENCODED = re.compile(r"[/#@?]|%(?![0-9A-Fa-f]{2})")
_QUERY = re.compile(r"\s*(select|with)\b", re.IGNORECASE)
_TABLES = {
    "postgresql": "SELECT table_schema || '.' || table_name FROM information_schema.tables "
    "WHERE table_schema NOT IN ('pg_catalog', 'information_schema') ORDER BY 1",
    "sqlite": "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') "
    "AND name NOT LIKE 'sqlite_%' ORDER BY 1",
}
_DRIVERS = {"postgresql": "adbc_driver_postgresql.dbapi", "sqlite": "adbc_driver_sqlite.dbapi"}
_CONNECT_SECONDS = 30
_ROWS = 1024


def scheme_of(source: str | Path) -> str | None:
    """Return the scheme of an address; None for a path.

    >>> scheme_of("hf://openai/gsm8k"), scheme_of("tasks.jsonl")
    ('hf', None)
    """
    found = _SCHEME.match(source) if isinstance(source, str) else None
    return found[1] if found else None


def shown(source: str | Path) -> str:
    """Return a source as messages and lineage name it: an address without user and password.

    >>> shown("postgresql://me:secret@db/lab#tasks")
    'postgresql://db/lab#tasks'
    """
    # up to the last @ of the address: a password may have characters that it should not
    user = r"[^/#@]*@" if scheme_of(source) in _NO_USERS else _USER
    return re.sub(rf"^([\w+.-]+://){user}", r"\1", str(source)).partition("?")[0]


def matching(patterns: Iterable[str | Path]) -> list[str]:
    """Return the files of patterns, sorted within each, and addresses as they are.

    Raises InputError for a pattern without a file.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        # sorted, since the order of a folder differs from machine to machine
        names = sorted(glob(str(pattern), recursive=True))  # noqa: PTH207 - they may be absolute
        names = [str(pattern)] if scheme_of(pattern) else names
        if not names:
            raise InputError(f"no file matches `{pattern}`; nothing was imported")
        found |= dict.fromkeys(names)
    return list(found)


def fetch(source: str, folder: Path, *, split: str | None = None) -> InputFile:
    """Copy the rows of an address, or of a folder of the hub's, and return them as an Arrow file.

    Raises ConfigError for another kind of address, InputError for a source that cannot be read to
    its end.
    """
    scheme = scheme_of(source) or "hf"
    scheme = {"postgres": "postgresql"}.get(scheme, scheme)
    if scheme not in SOURCES:
        known = ", ".join(f"`{form}`" for form in SOURCES.values())
        raise ConfigError(
            f"cannot import from `{shown(source)}`, expected a file or one of {known}"
        )
    user = re.match(rf"postgres(?:ql)?://{_USER}", source)
    if user and _UNENCODED.search(user[1]):  # the driver would print parts of the password
        raise ConfigError(
            f"the user or password of `{shown(source)}` has one of `/ # @ ? %` as it is, expected "
            "it percent-encoded; write `/` as %2F, `#` as %23, `@` as %40, `?` as %3F, `%` as %25"
        )
    address, _, part = source.partition("#") if scheme_of(source) else (source, "", "")
    file = folder / "input.arrow"
    if scheme in _TABLES:
        taskset = _copy_table(scheme, address, part, shown(source), file)
        return InputFile(file, shown(source), "arrow", taskset=taskset)
    rows = _dataset(scheme, address.removeprefix(f"{scheme}://"), part, split)
    _write(rows.schema, rows.to_batches(max_chunksize=_ROWS), file, shown(source))
    taskset = Path(address).name.partition("@")[0]
    return InputFile(file, shown(source), "hf", paths=(file,), taskset=taskset)


def _copy_table(scheme: str, address: str, part: str, name: str, file: Path) -> str:
    """Copy a table or the result of a SELECT; return the name of its taskset."""
    try:
        driver: Any = import_module(_DRIVERS[scheme])
    except ImportError as error:
        raise missing_extra(error.name or f"adbc-driver-{scheme}", "data") from error
    try:
        with (
            closing(driver.connect(_uri(scheme, address))) as database,
            closing(database.cursor()) as cursor,
        ):
            if scheme == "postgresql":
                cursor.execute("SET TRANSACTION READ ONLY")
            query, table = _query(cursor, scheme, part, name)
            cursor.execute(query)
            reader = cursor.fetch_record_batch()
            _write(reader.schema, reader, file, name)
    except (driver.Error, pa.ArrowException, OSError) as error:
        text = str(error)
        options = parse_qs(urlsplit(address).query)
        for secret in (urlsplit(address).password, *options.get("password", ())):
            text = text.replace(secret or "\0", "***")
        text = " ".join(text.split())[:500]
        raise InputError(f"cannot read `{name}`: {text}; nothing was imported") from error
    return table or Path(urlsplit(address).path).stem


def _uri(scheme: str, address: str) -> str:
    if scheme == "sqlite":
        path = Path(address.partition(":///")[2])
        if not path.is_file():
            raise InputError(f"the database `{path}` does not exist; nothing was imported")
        return f"{path.absolute().as_uri()}?mode=ro"
    options = urlsplit(address).query
    if "connect_timeout" in parse_qs(options):
        return address
    return f"{address}{'&' if options else '?'}connect_timeout={_CONNECT_SECONDS}"


def _query(cursor: Any, scheme: str, part: str, name: str) -> tuple[str, str]:
    """Return the SELECT of a part of an address, and the table if it names one."""
    if _QUERY.match(part):
        return part, ""
    cursor.execute(_TABLES[scheme])
    known = [row[0] for row in cursor.fetchall()]
    plain = [table.removeprefix("public.") for table in known]
    if not part and len(plain) != 1:
        listed = ", ".join(f"`{table}`" for table in plain) or "no tables"
        raise InputError(f"`{name}` has {listed}; name one as `{name}#TABLE`, or a SELECT")
    part = part or plain[0]
    if part not in (*known, *plain):
        raise InputError(f"`{name}`: the database has no table `{part}`{nearest(part, plain)}")
    from_schema = part.split(".", 1) if scheme == "postgresql" else [part]
    return f"SELECT * FROM {'.'.join(map(quoted, from_schema))}", part.rpartition(".")[2]


def _dataset(scheme: str, name: str, config: str, split: str | None) -> pa.Table:
    """Return a dataset of a hub, or of a folder, as a memory-mapped table."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise missing_extra("datasets", "data") from error
    datasets.disable_progress_bars()
    repository, _, revision = (name, "", "") if Path(name).is_dir() else name.partition("@")
    try:
        if scheme == "modelscope":
            found = _modelscope(repository, config, revision, split)
        else:
            found = datasets.load_dataset(repository, config or None, revision=revision or None)
    except (DatasetsError, OSError, ValueError) as error:
        text = " ".join(str(error).split())[:500]
        raise InputError(
            f"cannot read the dataset `{name}`: {text}; nothing was imported"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        found = found[_split_of(map(str, found), name, split)]
    return found.with_format("arrow")[:]


def _split_of(splits: Iterable[str], name: str, split: str | None) -> str:
    known = list(splits)
    if split is None and len(known) == 1:
        return known[0]
    if split is None:
        listed = ", ".join(f"`{one}`" for one in known)
        raise ConfigError(f"`{name}` has the splits {listed}; choose one with `--split`")
    if split not in known:
        raise ConfigError(f"`{name}` has no split `{split}`{nearest(split, known)}")
    return split


def _modelscope(repository: str, config: str, revision: str, split: str | None) -> Any:
    try:
        from modelscope.msdatasets import MsDataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(
            f"`modelscope://{repository}` needs the package `modelscope`; install it with "
            "`pip install modelscope`"
        ) from error
    options = {"version": revision} if revision else {}
    found = MsDataset.load(repository, subset_name=config or None, split=split, **options)
    return found.to_hf_dataset() if hasattr(found, "to_hf_dataset") else found


def _write(schema: pa.Schema, batches: Iterable[pa.RecordBatch], file: Path, name: str) -> None:
    rows = 0
    with pa.ipc.new_file(str(file), schema) as out:
        for batch in batches:
            out.write_batch(batch)
            rows += batch.num_rows
    if not rows:
        raise InputError(f"`{name}` has no rows; nothing was imported")
