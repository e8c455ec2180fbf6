"""Hosts of a slow network on one machine: network namespaces with a limited rate between them.

Needs root on Linux, and the commands `ip`, `tc` and `unshare`. Every host has its own name and
address, so the library finds no memory that its processes share with other hosts.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

COMMANDS = ("ip", "tc", "unshare")
LINK = "eth0"  # the name of the network device inside of a host
BURST_SECONDS, LEAST_BURST = 0.002, 32_000  # bytes; more would let short messages pass unlimited
# Only the rate shall limit messages: no pacing by BBR, no slow start after each computation, short
# queues, so that acknowledgements do not wait behind data, and windows larger than all messages.
TCP_SETTINGS = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_limit_output_bytes": "16384",
    "tcp_rmem": "4096 8388608 16777216",
    "tcp_wmem": "4096 8388608 16777216",
}
NETWORK, HOSTNAME = 0x40000000, 0x04000000  # kinds of namespaces, for setns and unshare


@dataclass(frozen=True)
class SimulatedHost:
    """One host: its name, its address, and the end of its network cable outside."""

    name: str
    address: str
    cable: str

    def command(self, argv: Sequence[str]) -> list[str]:
        named = ["sh", "-c", f'hostname {self.name}; exec "$@"', "sh", *argv]
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", *named]

    def enter(self) -> None:
        """Move this process to the host. Call it before the process starts threads."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{self.name}") as namespace:
            moved = libc.setns(namespace.fileno(), NETWORK) == 0 and libc.unshare(HOSTNAME) == 0
        if not moved:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), self.name)
        socket.sethostname(self.name)

    def limit(self, mbit: float) -> None:
        """Send at most this many megabits per second."""
        burst = max(LEAST_BURST, int(mbit * 1e6 / 8 * BURST_SECONDS))
        rate = ("rate", f"{mbit}mbit", "burst", str(burst), "latency", "2s")  # no loss
        _run("tc", "-n", self.name, "qdisc", "replace", "dev", LINK, "root", "tbf", *rate)

    def connect(self, connected: bool) -> None:
        """Plug the network cable in, or out: then all messages are lost."""
        _run("ip", "link", "set", self.cable, "up" if connected else "down")


def obstacle() -> str:
    """Return why hosts cannot be simulated here; empty if they can."""
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    return "" if os.geteuid() == 0 else "network namespaces need root"


@contextmanager
def hosts(count: int, mbit: int, label: str = "") -> Iterator[list[SimulatedHost]]:
    """Yield hosts that send at most this many megabits per second each; removed at the end.

    label: a letter or digit; different for every group of hosts of this process.
    """
    prefix = f"uep{os.getpid()}{label}"
    bridge = f"{prefix}br"
    simulated = [
        SimulatedHost(f"{prefix}h{n}", f"10.77.0.{n + 1}", f"{prefix}v{n}") for n in range(count)
    ]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for host in simulated:
            outer, inside = host.cable, ("ip", "-n", host.name)
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", outer, "type", "veth", "peer", LINK, "netns", host.name)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", LINK)
            _run(*inside, "link", "set", LINK, "gso_max_segs", "1", "up")
            _run(*inside, "link", "set", "lo", "up")
            host.limit(mbit)
            for name, value in TCP_SETTINGS.items():
                _run(*host.command(["sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}"]))
        yield simulated
    finally:
        for number, host in enumerate(simulated):
            # A namespace keeps its devices for a while after its end; the next hosts need the name.
            for part in (["link", "del", f"{prefix}v{number}"], ["netns", "del", host.name]):
                subprocess.run(["ip", *part], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _run(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)}: {ran.stderr.strip()}")
