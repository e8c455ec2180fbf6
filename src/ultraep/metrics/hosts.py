"""Which `Host` headers an HTTP server on this machine answers.

A page of another site can lead a name of its own to this machine (DNS rebinding), and then read
what a local server answers to the user's browser. An address, and a name of this machine, cannot be
led here that way; every other name is refused.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence

NAME = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(\d{1,5}))?")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_names() -> set[str]:
    """Names by which others may know this machine."""
    return {socket.gethostname().lower(), socket.getfqdn().lower()}


def is_known_host(headers: Sequence[str], names: Collection[str], *, local: bool) -> bool:
    """Whether a request names this machine.

    headers: the values of its `Host` headers; there must be one.
    names: names of this machine besides localhost, in lower case.
    local: the server listens on a loopback address, so that no other address is right.
    """
    match = NAME.fullmatch(headers[0]) if len(headers) == 1 else None
    if match is None:
        return False
    name = match[1].lower()
    if name == "localhost" or name in names:
        return True
    try:
        address = ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or not local
