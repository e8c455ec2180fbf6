"""Which ranks a balancer balances, and the warning of one that has nowhere to put a replica."""

import warnings

import pytest
from ranks import PATIENCE, shared_pool

from ultraep import Balancer, ConfigError, LocalGroup, NothingToBalance
from ultraep.runtime.mapped.peers import LocalPeers


def sizes(rank, group):
    """Ranks of a balancer of the default group, of a named group, and of this process alone."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in (None, group, "alone"):
            balancer = Balancer(given, experts=4, timeout=PATIENCE)
            found.append((balancer.comm.size, balancer.rank, balancer.group is group))
            balancer.close()
    return found


def test_none_is_the_default_group_and_one_process_is_asked_for_by_name():
    for rank, found in enumerate(shared_pool().run(2, sizes)):
        assert found == [(2, rank, True), (2, rank, True), (1, 0, False)]


def test_processes_that_have_not_met_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"started 4 processes.*call torch.*init_process_group"):
        Balancer(experts=8)
    assert Balancer("alone", experts=8).comm.size == 1


@pytest.mark.parametrize("group", ["everyone", 1.5, -100])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(ConfigError, match="or 'alone', got"):
        Balancer(group, experts=8)


def test_one_rank_is_warned_about_where_the_balancer_is_made(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.warns(
        NothingToBalance, match=r"one rank; start .* torchrun .*group='alone'"
    ) as got:
        Balancer(experts=8)
    assert [warning.filename for warning in got] == [__file__]


@pytest.mark.parametrize(
    ("options", "cause"),
    [({"slots": 0}, "slots=0 leaves no place"), ({"domain": 1}, "domain=1 keeps replicas")],
    ids=["slots", "domain"],
)
def test_ranks_without_a_place_for_replicas_are_warned_about_once(options, cause):
    def work(comm):
        Balancer(experts=8, communicator=comm, **options)

    with pytest.warns(NothingToBalance, match=cause) as got:
        LocalGroup(4).run(work)
    assert len(got) == 1


def test_what_was_asked_for_is_not_warned_about():
    """Warnings are errors here."""
    Balancer("alone", experts=8, slots=0)
    Balancer(experts=8, policy="none")
    Balancer(experts=8, peers=LocalPeers(1, "cpu").of(0))
    LocalGroup(1).run(lambda comm: Balancer(experts=8, communicator=comm))
    LocalGroup(2).run(lambda comm: Balancer(experts=8, slots=0, communicator=comm, policy="none"))
