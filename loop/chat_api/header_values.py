"""Names in headers, which hold no more than ASCII: percent-encoded, both ways."""

import string
from collections.abc import Mapping
from urllib.parse import quote, unquote

from .errors import RequestError
from .requests import identifier

_AS_THEY_ARE = (string.punctuation + "~").replace("%", "")


def for_header(name: str) -> str:
    """Return a name as a header holds it.

    >>> for_header("agent-7"), for_header("žluť 50%")
    ('agent-7', '%C5%BElu%C5%A5%2050%25')
    """
    return quote(name, safe=_AS_THEY_ARE)


def of_header(headers: Mapping[str, str], name: str) -> str | None:
    """Return the name that a header holds, plain or percent-encoded; RequestError for none.

    >>> of_header({"X-Session-Id": "%C5%BElu%C5%A5"}, "X-Session-Id")
    'žluť'
    """
    message = headers.get(name)
    if message is None:
        return None
    try:
        text = message.encode("latin-1").decode()  # HTTP's own reading, undone
    except UnicodeError:
        text = message
    try:
        return identifier(unquote(text, errors="strict"), name)
    except UnicodeDecodeError:
        raise RequestError(f"`{name}` must be percent-encoded UTF-8", param=name) from None
