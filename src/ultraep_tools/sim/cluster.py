"""Cluster: devices, their rates, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from ultraep_tools.sim.presets import as_record, check_positive, check_range, load_table

GIGA = 1e9
MICRO = 1e-6


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices in equal fast-link domains. All rates are per device and direction."""

    name: str
    title: str
    source: str
    devices: int
    domain: int  # devices connected by the fast link
    memory_gb: float
    matmul_tflops: float  # dense BF16
    memory_gb_s: float
    link_gb_s: float  # fast link, inside a domain
    link_us: float
    network_gb_s: float  # between domains
    network_us: float

    def __post_init__(self) -> None:
        where = f"cluster {self.name}: "
        check_range(self, "devices domain", 1, where=where)
        check_positive(self, "memory_gb matmul_tflops memory_gb_s link_gb_s network_gb_s", where)
        check_range(self, "link_us network_us", 0, where=where)

    @property
    def memory(self) -> float:
        """Bytes of memory per device."""
        return self.memory_gb * GIGA

    @property
    def matmul(self) -> float:
        """Data-sheet operations per second of dense BF16 products."""
        return self.matmul_tflops * 1e12

    @property
    def memory_rate(self) -> float:
        """Data-sheet bytes per second of device memory."""
        return self.memory_gb_s * GIGA

    def domain_of(self, ranks: int) -> int:
        """Return the ranks per domain: the largest equal blocks of the group that fit."""
        sizes = range(min(ranks, self.domain), 0, -1)
        return next(size for size in sizes if ranks % size == 0)


def load_cluster(name: str) -> Cluster:
    return as_record(Cluster, load_table("clusters", name), f"cluster {name}")
