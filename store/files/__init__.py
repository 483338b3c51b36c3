"""Files become rows of the store and rows become files: import and export."""

from .export import Exported, export
from .export_shapes import EXPORTS
from .file_kind import KIND_NAMES, InputFile, open_input
from .formats import FORMATS
from .hub_upload import ROWS_FILE, push_folder
from .importer import Imported, check_select, import_file, import_rows
from .rejected_rows import Rejected
from .remote import matching, scheme_of, shown
from .tokenize import Tokens
from .values import import_values

__all__ = [
    "EXPORTS",
    "FORMATS",
    "KIND_NAMES",
    "ROWS_FILE",
    "Exported",
    "Imported",
    "InputFile",
    "Rejected",
    "Tokens",
    "check_select",
    "export",
    "import_file",
    "import_rows",
    "import_values",
    "matching",
    "open_input",
    "push_folder",
    "scheme_of",
    "shown",
]
