"""The hybrid plane: several domains of ranks, against a dense layer without ranks.

200 of each with `pytest -m long tests/runtime/test_hybrid.py`; some of them otherwise.
"""

import platform

import numpy as np
import pytest
import torch.distributed as dist
from dense import Example, assert_same, dense
from mapped_ranks import mapped_rank
from ranks import PATIENCE, on_ranks, shared_pool
from test_random_layers import assert_dense, drawn, one_pass, seeds

from ultraep import Balancer, ConfigError, LocalGroup, Topology, UltraEPError
from ultraep.backends.triton.device import interpreted
from ultraep.runtime import connect as connect_module
from ultraep.runtime import hosts
from ultraep.runtime.hosts import Host, fast_links
from ultraep.runtime.local import LocalCommunicator
from ultraep.runtime.mapped.peers import together
from ultraep_tools.check.group import obstacles

pytestmark = pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")  # some have no slots
only_interpreted = pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")


def in_domains(seed, ranks):
    """Draw a layer over up to this many ranks, in two or more domains."""
    rng = np.random.default_rng(seed)
    while True:
        example, options, again = drawn(int(rng.integers(1 << 30)), most_ranks=ranks)
        sizes = [size for size in (1, 2, 3) if example.ranks % size == 0 and size < example.ranks]
        if not sizes:
            continue
        domain = int(rng.choice(sizes))
        homes = np.bincount(
            np.array(options["experts"]) // domain, minlength=example.ranks // domain
        )
        if homes.min() >= max(1, options["slots"]):
            return example, options | {"domain": domain}, again


def over_messages(example, options, again):
    """Run a layer; also check that no token crosses twice, in every microbatch and direction."""

    def work(local):
        comm = CountingCommunicator(local, options["domain"])
        balancer = Balancer._with_settings(comm, data_plane="hybrid", **options)
        return one_pass(balancer, example, again), comm.crossed

    results = LocalGroup(example.ranks).run(work)
    own, size = fewest_crossing(example, options), example.inputs[0].itemsize
    row, scalars, slots = example.hidden * size, example.top_k * size, example.top_k * 4
    widths = [row + scalars + slots, row] * (2 if again else 1)  # dispatch, combine
    widths += [row, row + scalars]  # and the gradients of both
    for rank, (_, crossed) in enumerate(results):
        assert [width for _, width in crossed] == widths
        sent = [rows for rows, _ in crossed]
        assert sent[0::2] == [own[rank]] * len(sent[0::2])
    totals = np.sum([[rows for rows, _ in crossed] for _, crossed in results], axis=0)
    assert (totals == sum(own)).all()  # sums return the way that tokens came
    return [result for result, _ in results]


def fewest_crossing(example, options):
    """Return the fewest rows that each rank must send to other domains."""
    domains = np.array(options["experts"]) // options["domain"]
    layer, fewest = example.twin(), []
    for rank, x in enumerate(example.inputs):
        own, ids = (
            rank // options["domain"],
            example.ids[rank] if example.ids else layer.route(x)[0],
        )
        rows = (domains[row[row >= 0]] for row in ids.numpy())
        fewest.append(sum(len(set(row.tolist()) - {own}) for row in rows))
    return fewest


def mapped_inside(rank, group, example, options, again):
    with mapped_rank(group, data_plane="hybrid", **options) as balancer:
        return one_pass(balancer, example, again)


@pytest.mark.usefixtures("one_thread")
@seeds(some=10)
def test_random_layers_with_messages_inside(first, count):
    for seed in range(first, first + count):
        example, options, again = in_domains(seed, ranks=6)
        assert_dense(example, options, over_messages(example, options, again))


@only_interpreted
@seeds(some=3)
def test_random_layers_with_mapped_memory_inside(first, count):
    for seed in range(1000 + first, 1000 + first + count):
        example, options, again = in_domains(seed, ranks=4)
        actual = shared_pool().run(example.ranks, mapped_inside, example, options, again)
        assert_dense(example, options, actual)


class CountingCommunicator(LocalCommunicator):
    def __init__(self, comm, domain):
        self.__dict__.update(comm.__dict__)
        self.domain, self.crossed = domain, []

    def all_to_all(self, rows, send_counts, receive_counts):
        own = self.rank // self.domain
        crossing = sum(n for r, n in enumerate(send_counts) if r // self.domain != own)
        self.crossed.append((crossing, rows.shape[1] * rows.itemsize))
        return super().all_to_all(rows, send_counts, receive_counts)

    def part(self, size):
        return LocalCommunicator.part(LocalCommunicator(self._group, self.rank), size)


def test_auto_uses_domains_of_hosts(monkeypatch):
    hosts = [Host("one", ()), Host("one", ()), Host("two", ()), Host("two", ())]
    monkeypatch.setattr(connect_module, "find_fast_links", lambda *_: fast_links(hosts))
    example = Example([5, 5, 5, 5], experts=8, top_k=2, hidden=8, ffn=4, seed=1)

    def work(comm):
        balancer = Balancer(comm, experts=8)
        return repr(balancer), one_pass(balancer, example, False), repr(balancer)

    results = LocalGroup(4).run(work)
    assert "data plane hybrid on cpu: fast links join the ranks of each domain" in results[0][2]
    assert_same([r[1] for r in results], dense(example), Topology(ranks=4, experts=8))


def test_one_host_stays_with_messages():
    def work(comm):
        balancer = Balancer(comm, experts=8, domain=2)
        balancer.plane("cpu")
        return repr(balancer)

    assert "messages on cpu: tokens are on the CPU" in LocalGroup(4).run(work)[0]


def errors_of(work, ranks=4):

    def caught(comm):
        with pytest.raises(UltraEPError) as error:
            work(comm)
        return str(error.value)

    (message,) = set(LocalGroup(ranks).run(caught))
    return message


def with_domains(comm, device="cpu", *, blind=False, **options):
    balancer = Balancer._with_settings(
        comm, **{"experts": 8, "domain": 2, "data_plane": "hybrid"} | options
    )
    if blind:  # comparing sends a tensor of the device
        balancer._agreement.compare = lambda *_: None
    balancer.plane(device)


HOST = platform.node()
REFUSED = {
    "one domain": (
        lambda comm: with_domains(comm, domain=None),
        ["all 4 ranks are in one domain: pass domain="],
    ),
    "different domains": (
        lambda comm: with_domains(comm, domain=4 if comm.rank == 3 else 2),
        [
            f"ranks disagree about their domains: rank 0: {HOST} with domain=2",
            f"rank 3: {HOST} with domain=4; pass the same on all",
        ],
    ),
    "domains that do not divide the group": (
        lambda comm: with_domains(comm, domain=3),
        ["4 ranks do not divide by a domain of 3"],
    ),
    "different devices": (
        lambda comm: with_domains(comm, "meta" if comm.rank == 1 else "cpu", blind=True),
        [f"rank 0: cpu on {HOST}, domain 0; rank 1: meta on {HOST}, domain 0"],
    ),
    "a domain without experts": (
        lambda comm: with_domains(comm, experts=[0, 0, 1, 1]),
        ["domain 1 is the home of 0 experts"],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_domains_are_refused_on_all_ranks(what):
    work, words = REFUSED[what]
    message = errors_of(work)
    for part in words:
        assert part in message


def test_an_obstacle_of_one_rank_is_shown_with_a_map(monkeypatch):
    def part(comm, size):
        if comm.rank == 2:
            raise ConfigError("no peer access")
        return comm

    monkeypatch.setattr(LocalCommunicator, "part", part)
    message = errors_of(with_domains)
    assert "data_plane='hybrid' is not possible: rank 2: no peer access (rank 0: cpu on" in message
    assert message.endswith("domain 1)")


def test_memory_that_one_rank_cannot_map_is_an_error_on_all():
    def work(comm):
        def act():
            if comm.rank == 1:
                raise RuntimeError("CUDA error: out of memory\nmore lines")
            return "mapped"

        assert together(comm, "share", lambda: "mapped") == "mapped"
        together(comm, "share 64 bytes", act)

    message = errors_of(work, ranks=3)
    expected = "rank 1: cannot share 64 bytes with its peers: CUDA error: out of memory"
    assert message == expected


@on_ranks(4)
def test_processes_of_two_domains(rank, group, tmp_path):
    example = Example([7, 3, 5, 6], experts=8, top_k=3, hidden=8, ffn=4, seed=3)
    balancer = Balancer(group, experts=8, domain=2, data_plane="hybrid", timeout=PATIENCE)
    results = [None] * 4
    dist.all_gather_object(results, one_pass(balancer, example, False))
    balancer.close()
    assert_same(results, dense(example), Topology(ranks=4, experts=8))


# Which ranks a fast link joins


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
