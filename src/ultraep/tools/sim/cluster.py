"""Cluster: devices, their rates, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from ultraep.errors import ConfigError
from ultraep.tools.sim.presets import check_least, check_positive, load_record

GIGA = 1e9
MICRO = 1e-6


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in equal fast-link domains; rates are per device and direction."""

    name: str
    title: str
    source: str
    devices: int
    domain: int  # devices joined by the fast link
    memory_gb: float
    matmul_tflops: float  # dense BF16
    memory_gb_s: float
    link_gb_s: float  # fast link, inside of a domain
    link_us: float
    network_gb_s: float  # between domains
    network_us: float

    def __post_init__(self) -> None:
        where = f"cluster {self.name}: "
        check_least(self, "devices domain", 1, where=where)
        check_positive(self, "memory_gb matmul_tflops memory_gb_s link_gb_s network_gb_s", where)
        check_least(self, "link_us network_us", 0, where=where)

    @property
    def memory(self) -> float:
        """Bytes of one device."""
        return self.memory_gb * GIGA

    @property
    def matmul(self) -> float:
        """Operations per second of dense BF16 products, by the data sheet."""
        return self.matmul_tflops * 1e12

    @property
    def memory_rate(self) -> float:
        """Bytes per second of the device's own memory, by the data sheet."""
        return self.memory_gb_s * GIGA

    @property
    def link_rate(self) -> float:
        """Bytes per second and direction of the fast link, by the data sheet."""
        return self.link_gb_s * GIGA

    @property
    def network_rate(self) -> float:
        """Bytes per second and direction of a device's way out of its domain."""
        return self.network_gb_s * GIGA

    def domain_of(self, ranks: int) -> int:
        """Ranks of a group that share a domain: the largest equal blocks that fit."""
        if ranks > self.devices:
            raise ConfigError(
                f"{ranks} ranks do not fit on cluster {self.name} with {self.devices} devices"
            )
        if ranks <= self.domain:
            return ranks
        return max(size for size in range(1, self.domain + 1) if ranks % size == 0)


def load_cluster(name: str) -> Cluster:
    """Return a preset, or a cluster of a TOML file."""
    return load_record(Cluster, "clusters", name)
