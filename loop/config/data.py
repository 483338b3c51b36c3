"""What a run stores before it begins."""

from typing import Any, Literal

from pydantic import model_validator

from .base import Section


class FileConfig(Section):
    """A file whose rows are stored before the run begins, as `rlake import` does."""

    path: str
    table: Literal["experiences", "preferences"] = "experiences"
    """What its rows are."""
    format: str | None = None
    """One of `rlake import --help`, when the file does not tell."""
    sql: str | None = None
    """One SELECT over the table `input` that names our columns."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class DataConfig(Section):
    """Rows that a run trains on beside those of its explorer, or in place of them."""

    make: str | dict[str, dict[str, Any]] | None = None
    """A function that gives rows for tables, as `name` or `{name: {parameter: value}}`.

    It is given the tasks of `tasks.where`, and returns `{table: rows}`. Rows are stored once: what
    is there already, by its id, is left alone.
    """
    file: FileConfig | None = None
    """A path, or `{path: ..., table: ..., format: ..., sql: ...}`; stored once, whole.

    A run trains on all rows that `trainer.where` admits, those of the file among them.
    """

    @property
    def makes_rows(self) -> bool:
        """Whether rows are stored before the run begins."""
        return self.make is not None or self.file is not None
