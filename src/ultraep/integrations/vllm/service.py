"""Settings, balancers and counters that the balanced layers of a model share."""

from __future__ import annotations

import atexit
import logging
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache, cached_property
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

from ultraep import __version__
from ultraep.bundle import Layout
from ultraep.config import BalanceConfig
from ultraep.integrations.common import idle_reason, outcome
from ultraep.integrations.vllm.counters import ServingCounters, where_they_are
from ultraep.integrations.vllm.refusals import (
    least_tokens,
    reasons_of_engine,
    reasons_of_layer,
    rows_to_pay,
)
from ultraep.integrations.vllm.settings import KEY, VLLM_LOGGER, ServingSettings
from ultraep.runtime.balancer import Balancer

counters_of_process = cache(ServingCounters)  # prometheus_client registers names once

# vLLM's opaque operations around a layer. Graphs are captured between them, so the host may plan.
SPLITTING_OPS = ("vllm::moe_forward", "vllm::moe_forward_shared")


class Service:
    """The balanced layers of one model on this rank.

    config: vLLM's configuration.   layers: in the order of creation, the same on all ranks.
    """

    def __init__(self, config: Any, settings: ServingSettings) -> None:
        self.config, self.settings = config, settings
        self.layers: list[Any] = []
        self._balancers: dict[tuple[int, int], Balancer] = {}
        self._least: dict[Balancer, int] = {}
        self._measured: set[str] = set()
        adapt_compilation(config, settings)

    @cached_property
    def ready(self) -> bool:
        """Whether the layers are balanced. The first access is collective and logs the decision."""
        reasons = reasons_of_engine(self.config)
        for layer in self.layers:
            reasons += reasons_of_layer(layer, homes_of(layer))
        if not reasons:
            self._open(get_ep_group())
        level = logging.WARNING if reasons else logging.INFO
        if self.config.parallel_config.data_parallel_rank == self.config.parallel_config.rank == 0:
            line = outcome(len(self.layers), "; ".join(reasons[:4])) if reasons else str(self)
            logging.getLogger(VLLM_LOGGER).log(level, line)
        return not reasons

    def _open(self, group: Any) -> None:
        """Create a balancer for each number of experts and register every layer. Collective."""
        counters = counters_of_process(group.rank_in_group)
        with ExitStack() as undo:
            for layer in self.layers:
                key = layer.global_num_experts, layer.top_k
                if key not in self._balancers:
                    balancer = self._balancers[key] = self._balancer(layer, group)
                    undo.callback(balancer.close)
                    balancer.subscribe(counters.add)
                layer.balancer = self._balancers[key]
                layer.layer_index = layer.balancer.register_layer()
            atexit.register(undo.pop_all().close)

    def _balancer(self, layer: Any, group: Any) -> Balancer:
        settings, device = self.settings, layer.w2_weight.device.type
        moe, homes = layer.moe_config, layer.local_num_experts
        parameters = moe.hidden_dim * moe.intermediate_size_per_partition * (moe.w13_num_shards + 1)
        nbytes = Layout.of(layer.bundle, homes).nbytes
        rows = settings.min_rows or rows_to_pay(nbytes, parameters, device)
        balancer = Balancer(
            group.cpu_group if device == "cpu" else group.device_group,
            experts=homes_of(layer),
            slots=settings.slots,
            config=BalanceConfig(
                policy=settings.policy,
                tolerance=settings.tolerance,
                min_tokens_per_replica=rows,
                objective="balance",  # `rows` says which replicas pay
            ),
            record=settings.record,
        )
        self._least[balancer] = least_tokens(rows, balancer.comm.size, layer.top_k)
        return balancer

    def leaves(self, layer: Any) -> bool:
        """Return whether vLLM runs this batch of the layer itself.

        On GPUs it runs batches of full CUDA graphs, whose replays cannot plan on the host, and
        batches too small to balance. It also runs the first batch of a layer, its profile run,
        which sets the size of its workspaces. On CPUs vLLM has no all-to-all of its own.
        """
        if layer.w2_weight.device.type == "cpu":
            return False
        first = layer.layer_name not in self._measured
        self._measured.add(layer.layer_name)
        full = get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.FULL
        return first or full or self._is_small(layer.balancer)

    def policy(self, balancer: Balancer) -> str | None:
        """Return "none" for a batch that is too small to balance, else None."""
        return "none" if self._is_small(balancer) else None

    def _is_small(self, balancer: Balancer) -> bool:
        """VLLM shares the token counts of all ranks before every forward pass."""
        metadata = get_forward_context().dp_metadata
        assert metadata is not None, "data parallelism provides the token counts of all ranks"
        tokens = int(metadata.num_tokens_across_dp_cpu.sum())
        return tokens < self._least[balancer]

    def __str__(self) -> str:
        balancer = self.layers[0].balancer
        topology, config = balancer.topology, balancer.config
        tensors = self.layers[0].bundle
        nbytes = Layout.of(tensors, len(self.layers[0].w2_weight)).nbytes * topology.slots
        untested = "" if self.layers[0].w2_weight.device.type == "cpu" else " (not tested on GPUs)"
        line = outcome(len(self.layers), idle_reason(balancer), slots=topology.slots)
        return (
            f"{line}: {topology.experts} experts over {topology.ranks} ranks{untested}, "
            f"policy {config.policy}, tolerance {config.tolerance:g}, "
            f"{nbytes / 1e6:,.1f} MB of slots; ultraep {__version__}; "
            f"batches under {self._least[balancer]:,} tokens are not balanced, a replica serves "
            f"{config.min_tokens_per_replica:,} rows or more; {where_they_are()}"
        )


def adapt_compilation(config: Any, settings: ServingSettings) -> None:
    """Keep the layers out of captured graphs, and the settings in the key of compiled code."""
    compilation = config.compilation_config
    if compilation.splitting_ops:  # empty: nothing is captured in pieces
        compilation.splitting_ops += [
            op for op in SPLITTING_OPS if op not in compilation.splitting_ops
        ]
    if isinstance(config.additional_config, dict):
        config.additional_config = {**config.additional_config, KEY: asdict(settings)}


def homes_of(layer: Any) -> list[int]:
    """Return the home rank of every expert, as placed by vLLM."""
    ranks = layer.moe_config.moe_parallel_config.ep_size
    homes = [0] * layer.global_num_experts
    for rank in range(ranks):
        _, expert_map, _ = determine_expert_map(
            ranks, rank, layer.global_num_experts, layer.expert_placement_strategy
        )
        if expert_map is not None:  # None: rank 0 has all experts
            for expert in (expert_map >= 0).nonzero().flatten().tolist():
                homes[expert] = rank
    return homes
