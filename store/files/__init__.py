"""Files become rows of the store and rows become files: import and export."""

from .exporting import Exported, export, export_dpo, export_experiences, export_sft
from .formats import FORMATS
from .importing import Imported, check_select, import_rows
from .reading import KIND_NAMES, InputFile, open_input
from .rejecting import Rejected
from .shapes import EXPORTS
from .tokens import Tokens
from .values import import_values

__all__ = [
    "EXPORTS",
    "FORMATS",
    "KIND_NAMES",
    "Exported",
    "Imported",
    "InputFile",
    "Rejected",
    "Tokens",
    "check_select",
    "export",
    "export_dpo",
    "export_experiences",
    "export_sft",
    "import_rows",
    "import_values",
    "open_input",
]
