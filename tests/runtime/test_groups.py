"""The group and the data plane of a balancer; the warning if it cannot place replicas."""

import gc
import warnings

import pytest
import torch
from microbatches import counted
from ranks import PATIENCE, shared_pool

from ultraep import Balancer, ConfigError, LocalGroup, NothingToBalance
from ultraep.integrations.common import shared_balancer
from ultraep.runtime import planes
from ultraep.runtime.planes import PlaneKind


def sizes(rank, group):
    actual = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in (None, group, "alone"):
            balancer = Balancer(given, experts=4, timeout=PATIENCE)
            actual.append((balancer.comm.size, balancer.rank, balancer.group is group))
            balancer.close()
    return actual


def test_none_is_the_default_group_and_alone_is_this_process():
    for rank, actual in enumerate(shared_pool().run(2, sizes)):
        assert actual == [(2, rank, True), (2, rank, True), (1, 0, False)]


def shared(rank, group):
    """Rank 0 keeps a balancer whose model the other ranks have deleted."""
    kept = [shared_balancer(group, 4, timeout=PATIENCE)]
    if rank:
        kept.clear()
        gc.collect()
    first, second = (shared_balancer(group, 4, timeout=PATIENCE) for _ in range(2))
    return first is second, first in kept


def test_a_shared_balancer_does_not_depend_on_what_one_rank_keeps():
    assert shared_pool().run(2, shared) == [(True, False)] * 2


def test_auto_tries_the_registered_data_planes_in_order(monkeypatch):
    def refuse(site):
        raise ConfigError(f"{site.comm.size} ranks form no domains")

    hybrid = PlaneKind("hybrid", refuse, obstacle=lambda site: "")
    mapped, _, messages = planes.PLANES
    monkeypatch.setattr(planes, "PLANES", (mapped, hybrid, messages))
    ids = torch.zeros(4, 1, dtype=torch.int64)
    balancer = Balancer("alone", experts=4)
    counted(balancer, ids)
    assert "messages on cpu: rank 0: 1 ranks form no domains" in repr(balancer)
    with pytest.raises(ConfigError, match="'hybrid' is not possible: rank 0: 1 ranks form"):
        counted(Balancer("alone", experts=4, data_plane="hybrid"), ids)


def test_processes_without_a_process_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"started 4 processes.*call torch.*init_process_group"):
        Balancer(experts=8)
    assert Balancer("alone", experts=8).comm.size == 1


@pytest.mark.parametrize("group", ["everyone", 1.5, -100])
def test_an_invalid_group_is_refused(group):
    with pytest.raises(ConfigError, match="'alone' or a Communicator, got"):
        Balancer(group, experts=8)


def test_a_group_of_no_ranks_is_refused():
    with pytest.raises(ConfigError, match="at least one rank, got 0"):
        LocalGroup(0)


def test_the_warning_about_one_rank_points_to_the_caller(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.warns(
        NothingToBalance, match=r"one rank; start .* torchrun .*group='alone'"
    ) as got:
        Balancer(experts=8)
    assert [warning.filename for warning in got] == [__file__]


@pytest.mark.parametrize(
    ("options", "cause"),
    [({"slots": 0}, "slots=0; pass slots=1"), ({"domain": 1}, "domain=1; pass .* a larger domain")],
    ids=["slots", "domain"],
)
def test_ranks_that_cannot_place_replicas_warn_once(options, cause):
    def work(comm):
        Balancer._with_settings(comm, experts=8, **options)

    with pytest.warns(NothingToBalance, match=cause) as got:
        LocalGroup(4).run(work)
    assert len(got) == 1


def test_explicit_choices_do_not_warn():
    """Warnings are errors here."""
    Balancer("alone", experts=8, slots=0)
    Balancer(experts=8, policy="none")
    LocalGroup(1).run(lambda comm: Balancer(comm, experts=8))
    LocalGroup(2).run(lambda comm: Balancer(comm, experts=8, slots=0, policy="none"))
