"""Files become rows of the store and rows become files: import and export."""

from .exporting import Exported, export_dpo, export_experiences, export_sft
from .importing import Imported, check_select, import_rows
from .reading import FORMATS, InputFile, open_input

__all__ = [
    "FORMATS",
    "Exported",
    "Imported",
    "InputFile",
    "check_select",
    "export_dpo",
    "export_experiences",
    "export_sft",
    "import_rows",
    "open_input",
]
