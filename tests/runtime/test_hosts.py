"""Which ranks a fast link joins."""

import pytest

from ultraep.runtime import hosts
from ultraep.runtime.hosts import Host, fast_links
from ultraep_tools.check.group import obstacles

ONE, TWO = Host("one", ("boot 1", "shm", "pids")), Host("two", ("boot 2", "shm", "pids"))
IN_FABRIC = [host._replace(fabric="cluster clique 0") for host in (ONE, TWO)]


@pytest.mark.parametrize(
    ("ranks", "groups", "domain", "reason"),
    [
        ([ONE] * 4, 1, 4, "one domain: all ranks are on one"),
        ([ONE, ONE, TWO, TWO], 2, 2, "2 domains of 2 ranks: one; two"),
        ([ONE, TWO, ONE, TWO], 2, 4, "one domain: the ranks of one are not consecutive"),
        ([ONE, TWO, TWO], 2, 3, "different numbers of ranks, 1 on one, 2 on two"),
        ([*IN_FABRIC, *IN_FABRIC], 1, 4, "one domain: all ranks are on one, two"),
    ],
)
def test_domains(ranks, groups, domain, reason):
    links = fast_links(ranks)
    assert (links.groups, links.domain) == (groups, domain)
    assert reason in links.reason


def test_containers_of_one_machine_are_named():
    other = ONE._replace(name="container", place=("boot 1", "other shm", "other pids"))
    (reason,) = obstacles([ONE, other])
    assert "rank 1: in another container than one of the same machine" in reason


@pytest.mark.parametrize("variable", ["0", "1"])
def test_a_fabric_needs_permission(variable, monkeypatch, tmp_path):
    class Properties:
        uuid = "1234"

    monkeypatch.setenv("NCCL_CUMEM_ENABLE", variable)
    monkeypatch.setattr(hosts, "IMEX_CHANNELS", tmp_path)
    monkeypatch.setattr(hosts, "_fabric_of", lambda uuid: f"fabric of {uuid}")
    monkeypatch.setattr(hosts.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hosts.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(hosts.torch.cuda, "get_device_properties", lambda _: Properties)
    host = hosts.this_gpu_host()
    expected = "NCCL_CUMEM_ENABLE=0" if variable == "0" else f"no IMEX channel in {tmp_path}"
    assert (host.fabric, host.obstacle) == ("", expected)
    assert f"rank 0: its GPU has an NVLink fabric, but {expected}" in obstacles([host])
    (tmp_path / "channel0").touch()
    if variable == "1":
        assert hosts.this_gpu_host().fabric == "fabric of 1234"
