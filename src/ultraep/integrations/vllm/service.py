"""The balanced layers of a model, and what the plug-in reads from vLLM."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

from ultraep.integrations.serving import service as serving
from ultraep.integrations.serving.settings import KEY, ServingSettings
from ultraep.integrations.vllm.refusals import VLLM_LOGGER, reasons_of_engine, reasons_of_layer

# vLLM's opaque operations around a layer. Graphs are captured between them, so the host may plan.
SPLITTING_OPS = ("vllm::moe_forward", "vllm::moe_forward_shared")


class Service(serving.Service):
    """The balanced layers of one model on this rank.

    config: vLLM's configuration.
    """

    def __init__(self, config: Any, settings: ServingSettings) -> None:
        super().__init__(settings, VLLM_LOGGER)
        self.config = config
        self._measured: set[str] = set()
        adapt_compilation(config, settings)
        torch.cpu._init_amx()  # else vLLM's kernel in bfloat16 on x86 is an illegal instruction

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that logs."""
        parallel = self.config.parallel_config
        return bool(parallel.data_parallel_rank == parallel.rank == 0)

    def reasons(self) -> list[str]:
        """Return why no layer is balanced."""
        of_layers = (reasons_of_layer(layer, homes_of(layer)) for layer in self.layers)
        return sum(of_layers, reasons_of_engine(self.config))

    def group(self, device: str) -> Any:
        """Return the expert-parallel group."""
        group = get_ep_group()
        return group.cpu_group if device == "cpu" else group.device_group

    def homes_of(self, layer: Any) -> tuple[int, ...]:
        """Return the home rank of every expert of a layer."""
        return tuple(homes_of(layer))

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
        return first or full or self.is_small(layer)

    def tokens(self) -> int:
        """Return the tokens of all ranks, which vLLM shares before every forward pass."""
        metadata = get_forward_context().dp_metadata
        assert metadata is not None, "data parallelism provides the token counts of all ranks"
        return int(metadata.num_tokens_across_dp_cpu.sum())

    def most_tokens(self) -> int | None:
        """Return the most tokens that a batch of all ranks can have."""
        ranks = self.config.parallel_config.data_parallel_size
        return int(self.config.scheduler_config.max_num_batched_tokens * ranks)


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
