"""Defects that the fuzzer found: each of these inputs once raised an error of another library."""

import numpy as np
import pytest
import torch

import ultraep
from ultraep import (
    BalanceConfig,
    BalancedMoE,
    Balancer,
    ConfigError,
    LoadError,
    LocalGroup,
    PlanError,
    Topology,
    workload,
)
from ultraep.plan import plan_from_replicas
from ultraep.routes import from_vllm, packed_routes
from ultraep.runtime.settings import Settings
from ultraep.tools.launch.processes import RankPlace


@pytest.mark.parametrize("experts", [-1, 0, True, 2.5, 2**40, [], {}])
def test_counting_for_a_wrong_number_of_experts(experts):
    with pytest.raises(ConfigError, match="experts must be"):
        ultraep.count_loads([[0, 1]], experts)


@pytest.mark.parametrize("backend", [[], {}, 3])
def test_a_backend_that_is_no_name(backend):
    with pytest.raises(ConfigError, match="unknown backend"):
        Settings(backend=backend)


@pytest.mark.parametrize(
    "sizes",
    [
        {"ranks": 10**20, "experts": 8},
        {"ranks": 4, "experts": 2**31},
        {"ranks": 4, "experts": 8, "tokens": 2**31},
    ],
)
@pytest.mark.parametrize("draw", [workload.uniform, workload.one_hot])
def test_loads_that_are_too_large(draw, sizes):
    with pytest.raises(ConfigError, match="loads have at most"):
        draw(**sizes, **({"top_k": 1} if draw is workload.uniform else {}))


@pytest.mark.parametrize("lengths", [[2, -(2**63)], [-1, 2], [2**40, 1], [2, 3]])
def test_packed_routes_of_wrong_lengths(lengths):
    sequences = [torch.zeros(2, 1, 2), torch.zeros(1, 1, 2)]
    with pytest.raises(LoadError, match=r"has .* tokens, but the routes of"):
        packed_routes(sequences, lengths)


def test_routes_that_have_no_dimensions():
    with pytest.raises(LoadError, match=r"routes must be \[tokens, layers, K\]"):
        packed_routes([torch.tensor(3)], [1])


@pytest.mark.parametrize("layers", [[], [-1]])
def test_layers_of_vllm_that_do_not_exist(layers):
    with pytest.raises(LoadError, match="numbers of the routed layers"):
        from_vllm(np.zeros((1, 2, 2), dtype=np.int16), layers)


def test_a_rank_with_too_many_digits(monkeypatch):
    monkeypatch.setenv("RANK", "7" * 9999)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK must lie between"):
        RankPlace.of_torchrun()


def test_a_launcher_with_too_many_digits(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7" * 9999)
    with pytest.raises(ConfigError, match="the launcher started"):
        Balancer(experts=4)


def test_quotas_whose_sum_overflows():
    topology, loads = Topology(ranks=4, experts=4), np.full((4, 4), 5)
    placed = np.array([[0, 1, 2**62], [0, 2, 2**62]])
    with pytest.raises(PlanError, match="serves more rows than its expert has"):
        plan_from_replicas(loads, topology, BalanceConfig(), placed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("router.weight"), "Missing key"),
        (lambda state: state.update({"experts.down_proj": torch.tensor(1.0)}), "has the shape"),
        (lambda state: state.update({"router.weight": torch.zeros(4, 9)}), "size mismatch"),
    ],
)
def test_states_of_another_layer(change, message):
    comm = LocalGroup(1).run(lambda comm: comm)[0]
    balancer = Balancer(comm, experts=4, slots=0, policy="none")
    layer = BalancedMoE.swiglu(8, 4, 4, 2, balancer=balancer)
    state = layer.full_state_dict()
    change(state)
    with pytest.raises(ConfigError, match=message) as caught:
        layer.load_full_state_dict(state)
    assert len(str(caught.value).splitlines()) == 1
