"""The balanced layers of a model, and what the plug-in reads from SGLang."""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

import torch
from sglang.srt.layers.dp_attention import get_dp_global_num_tokens, get_is_extend_in_batch
from sglang.srt.runtime_context import get_parallel, get_schedule

from ultraep.errors import ConfigError
from ultraep.integrations.serving import service as serving
from ultraep.integrations.serving.settings import ServingSettings
from ultraep.integrations.sglang.refusals import (
    SGLANG_LOGGER,
    reasons_of_layer,
    reasons_of_server,
)

WITHOUT_STOCK = "; without ultraep, SGLang has no DeepEP for CPUs"


class Service(serving.Service):
    """The balanced layers of one model on this rank.

    arguments: SGLang's `ServerArgs`, resolved.
    """

    def __init__(self, arguments: Any, settings: ServingSettings) -> None:
        super().__init__(settings, SGLANG_LOGGER)
        self.on_cpu = arguments.device == "cpu"
        reasons = reasons_of_server(arguments)
        self.refused = bool(reasons)
        line = f"ultraep: no MoE layer balanced: {'; '.join(reasons)}"
        if self.refused and self.on_cpu and arguments.moe_a2a_backend == "deepep":
            raise ConfigError(line + WITHOUT_STOCK)
        if self.refused and self.is_first:
            self.logger.log(logging.WARNING, line)

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that logs."""
        return bool(get_parallel().tp_rank == 0 and get_parallel().pp_rank == 0)

    def verify(self, others: list[str]) -> None:
        """Decide and log, once the weights are loaded. Collective.

        others: names of the MoE layers whose class the plug-in did not replace.
        """
        self.others = others
        if not self.ready and self.on_cpu and (self.layers or others):
            raise ConfigError(self._refusal(self.reasons()) + WITHOUT_STOCK)

    def reasons(self) -> list[str]:
        """Return why no layer is balanced."""
        if not self.layers and not self.others:
            return ["the model has no MoE layer"]
        others = [f"{name} is not a DeepEPMoE: it gets all tokens" for name in self.others]
        return others + list(chain.from_iterable(map(reasons_of_layer, self.layers)))

    def group(self, device: str) -> Any:
        """Return the expert-parallel group."""
        group = get_parallel().moe_ep_group
        return group.cpu_group if device == "cpu" else group.device_group

    def homes_of(self, layer: Any) -> tuple[int, ...]:
        """Return the home rank of every expert of a layer."""
        return tuple(expert // layer.num_homes for expert in range(layer.num_experts))

    def tokens(self) -> int:
        """Return the tokens of all ranks, which SGLang shares before every forward pass."""
        return sum(get_dp_global_num_tokens())

    def most_tokens(self) -> int | None:
        """Return the most tokens that a batch of all ranks can have; None: unlimited."""
        chunk = get_schedule().chunked_prefill_size  # of one rank
        return chunk * get_parallel().attn_dp_size if chunk and chunk > 0 else None

    def leaves(self, layer: Any) -> bool:
        """Return whether SGLang runs this batch of the layer itself.

        On GPUs it runs decoding, which it captures in CUDA graphs whose replays cannot plan, and
        batches too small to balance. On CPUs it has no all-to-all of its own.
        """
        if self.on_cpu:
            return False
        captured = torch.cuda.is_current_stream_capturing()
        return captured or not get_is_extend_in_batch() or self.is_small(layer)
