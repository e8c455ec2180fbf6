"""Which `Host` headers an HTTP server on this machine accepts.

With DNS rebinding, a foreign web page lets a name of its own resolve to this machine, and then
reads a local server through the user's browser. IP addresses and names of this machine cannot be
rebound, so servers accept only these.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence

HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(\d{1,5}))?")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_names() -> set[str]:
    """Names of this machine in the network."""
    return {socket.gethostname().lower(), socket.getfqdn().lower()}


def is_known_host(headers: Sequence[str], names: Collection[str], *, local: bool) -> bool:
    """Whether a request names this machine.

    headers: the values of its `Host` headers; exactly one is allowed.
    names: names of this machine besides localhost, in lower case.
    local: whether the server listens on a loopback address; other addresses are then refused.
    """
    match = HOST.fullmatch(headers[0]) if len(headers) == 1 else None
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
