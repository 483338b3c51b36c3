"""Print which of Data-Juicer's operators can be used here as they are, and what others need."""

import os
import sys
import tempfile
from collections import Counter

from ...store.errors import RlakeError
from . import data_juicer, registry


def main() -> None:
    """Print a line an operator, its kind here or what it needs, and how many there are of each."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # some make folders where they are built
        for name, made in sorted(registry.operators().items()):
            of, message = registry.kind_of(made), _described(name)
            counts["usable" if message[0] != "-" else "not as it is"] += 1
            line = f"{name:<46} {of:<13} {message[0]:<8} {message[1]}".rstrip()
            sys.stdout.write(f"{line}\n")
        os.chdir("/")
    message = ", ".join(f"{n} {what}" for what, n in sorted(counts.items(), reverse=True))
    sys.stdout.write(f"{message}\n")


def _described(name: str) -> tuple[str, str]:
    try:
        op = data_juicer(operator=name)
    except RlakeError as error:
        return "-", str(error).removeprefix(f"Data-Juicer's `{name}` ")
    return op.kind, f"writes {', '.join(op.writes)}" if op.writes else ""


if __name__ == "__main__":
    main()
