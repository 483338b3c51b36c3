"""The address of this machine for others."""

import socket

ANYWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737), on the other side of a default route."""


def own_address(other: str = ANYWHERE) -> str:
    """Return the address under which another machine reaches this one.

    Raises OSError without a way to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it only chooses an interface
        return str(probe.getsockname()[0])
