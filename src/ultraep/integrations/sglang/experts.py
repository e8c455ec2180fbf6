"""Balanced experts for SGLang, on home weights and on replicas.

The balanced class replaces `DeepEPMoE`, whose `forward_impl` gets the tokens of its own rank and
logical expert ids. It keeps SGLang's loading, quantisation and kernels. Graphs of prefill call
`forward_impl` between their pieces.

Shapes: T tokens, K experts per token, n arrived rows, D model width.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.layers.moe.ep_moe.layer import DeepEPMoE
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE, create_moe_dispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import (
    StandardDispatcher,
    StandardDispatchOutput,
)
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_server_args

from ultraep.integrations.serving.experts import ServedExperts, ids_of_rows
from ultraep.integrations.serving.settings import read_settings
from ultraep.integrations.sglang.service import Service

_current: Service | None = None  # of this process, which has one model


def install() -> None:
    """Register the hooks; SGLang applies them after all plug-ins have run."""
    for target, hook, kind in (
        (DeepEPMoE, BalancedDeepEPMoE, HookType.REPLACE),
        (create_moe_dispatcher, create_dispatcher, HookType.AROUND),
        (ModelRunner.load_model, verify, HookType.AFTER),
        (Scheduler.run_event_loop, name_dead_ranks, HookType.AROUND),
    ):
        HookRegistry.register(f"{target.__module__}.{target.__qualname__}", hook, kind)


def current_service() -> Service | None:
    """Return the service of this process; None: its server is refused."""
    global _current
    if _current is None:
        settings = read_settings(os.environ)
        assert settings is not None, "the hooks are registered only if a setting is given"
        _current = Service(resolved_view(get_server_args()), settings)
    return None if _current.refused else _current


def create_dispatcher(original: Callable[..., Any], config: Any, quant_method: Any) -> Any:
    """Create the dispatcher of a layer. On CPUs, SGLang's would need GPUs, and is never used."""
    service = current_service()
    if service is not None and service.on_cpu:
        return StandardDispatcher(config)
    return original(config, quant_method)


def verify(_: None, runner: Any, *__: Any, **___: Any) -> None:
    """Check that all MoE layers of a loaded model are balanced."""
    service = current_service()
    if service is not None:
        layers = [layer for layer in runner.model.modules() if isinstance(layer, FusedMoE)]
        others = [layer for layer in layers if not isinstance(layer, BalancedDeepEPMoE)]
        service.verify([layer.layer_name for layer in others])


def name_dead_ranks(original: Callable[..., Any], scheduler: Any) -> Any:
    """Run the scheduler of a rank. If a message of SGLang fails, name the ranks that died."""
    try:
        return original(scheduler)
    except RuntimeError:
        service = current_service()
        if service is not None:
            service.check_alive()  # raises `CommunicationError`
        raise


class BalancedDeepEPMoE(ServedExperts, DeepEPMoE):  # type: ignore[misc]
    """SGLang's experts: home experts of this rank plus replicas for a batch."""

    service: Service | None

    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **options)
        self._methods: dict[int, Any] = {}
        self.service = current_service()
        if self.service is not None:
            self.service.layers.append(self)

    def forward_impl(self, hidden_states: torch.Tensor, topk_output: Any) -> torch.Tensor:
        """Map `[T, D]` to `[T, D]`, with `[T, K]` gates and expert ids. Rows of -1 are padding."""
        if self.service is None or not self.service.ready or self.service.leaves(self):
            outputs: torch.Tensor = super().forward_impl(hidden_states, topk_output)
            return outputs
        ids, gates = topk_output.topk_ids, topk_output.topk_weights
        rows = (ids[:, 0] >= 0).nonzero().flatten()
        if len(rows) == len(ids):
            return self.run_balanced(hidden_states, gates, ids)
        outputs = torch.zeros_like(hidden_states)
        outputs[rows] = self.run_balanced(hidden_states[rows], gates[rows], ids[rows])
        return outputs

    @property
    def num_homes(self) -> int:
        """Number of home experts of this rank."""
        return int(self.num_local_experts)

    def compute(
        self, rows: torch.Tensor, gates: torch.Tensor, counts: list[int], experts: Any
    ) -> torch.Tensor:
        """Run SGLang's kernel on `[n, D]` rows, `counts` rows for each expert of `experts`."""
        routed = StandardTopKOutput(gates[:, None], ids_of_rows(counts, rows), None)
        dispatched = StandardDispatchOutput(rows.contiguous(), None, routed)
        method = self._method(len(counts))
        outputs: torch.Tensor = method.apply(experts, dispatched).hidden_states
        return outputs

    def _method(self, experts: int) -> Any:
        """Return SGLang's quantisation method with kernels for this number of experts.

        The model multiplies by the scaling factor of the router, so the kernels must not.
        """
        if experts not in self._methods:
            config = replace(
                self.moe_runner_config,
                num_experts=experts,
                num_local_experts=experts,
                top_k=1,
                inplace=False,
                routed_scaling_factor=None,
            )
            method = self._methods[experts] = copy.copy(self.quant_method)
            method._forward_method = None  # it may be bound to the original
            method.create_moe_runner(self, config)
        return self._methods[experts]
