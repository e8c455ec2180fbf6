"""Balanced experts for vLLM, on home weights and on replicas.

vLLM looks up the class of a layer in a registry. The balanced class is a subclass of vLLM's, which
keeps its loading, quantisation and kernels, and overrides only the forward pass.

Shapes: T tokens, K experts per token, A arrived rows, n of them, D model width.
"""

from __future__ import annotations

import copy
import os
from itertools import pairwise
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    make_moe_prepare_and_finalize_no_dp_ep,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

from ultraep.comm import moved
from ultraep.dispatch import Arrivals
from ultraep.integrations.common import Overlay
from ultraep.integrations.vllm.refusals import OF_ROUTER
from ultraep.integrations.vllm.service import Service
from ultraep.integrations.vllm.settings import read_settings
from ultraep.layer import run_stages
from ultraep.microbatch import AnyPlan, Layer, Replicas
from ultraep.runtime.balancer import Balancer

_current: Service | None = None  # of the model being built


def install() -> None:
    """Register balanced experts with vLLM; idempotent.

    The registry is keyed by class name, and gpt-oss has its own class.
    """
    for original in (RoutedExperts, GptOssRoutedExperts):
        name = original.__name__
        if name not in op_registry_oot:
            op_registry_oot[name] = type(f"Balanced{name}", (BalancedRows, original), {})


def service_for(config: Any) -> Service | None:
    """Return the service of this model; None: no settings are given."""
    global _current
    settings = read_settings(os.environ, config.additional_config)
    if settings is None:
        return None
    if _current is None or _current.config is not config:
        _current = Service(config, settings)
    return _current


class BalancedRows(RoutedExperts):  # type: ignore[misc]
    """A mixin for vLLM's experts: home experts of this rank plus replicas for a batch.

    balancer, layer_index: the balancer and the index of the layer, if it is balanced.
    last_plan: the plan of the last batch.
    """

    balancer: Balancer | None = None
    layer_index: int
    last_plan: AnyPlan | None = None

    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **options)
        self.service = service_for(get_current_vllm_config())
        if self.service is not None:
            self.service.layers.append(self)

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> Any:
        """Map `[T, D]` to `[T, D]`, with `[T, K]` gates and expert ids."""
        if self.service is None or not self.service.ready:
            return super().forward_modular(
                x, topk_weights, topk_ids, shared_experts, shared_experts_input
            )
        return self._stages(x, topk_weights, topk_ids)

    def forward_monolithic(self, *inputs: Any, **options: Any) -> Any:
        """Run kernels that route by themselves, which are never balanced."""
        if self.service is not None:
            assert not self.service.ready, "layers whose kernels route by themselves are refused"
        return super().forward_monolithic(*inputs, **options)

    def _stages(self, x: torch.Tensor, gates: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        assert self.balancer is not None
        assert self.service is not None
        layer = Layer(self.layer_index, self.bundle, self._serve)
        policy = self.service.policy(self.balancer)
        outputs, self.last_plan = run_stages(self.balancer, layer, ids, gates, x, policy=policy)
        return outputs

    @property
    def bundle(self) -> dict[str, torch.Tensor]:
        """The tensors of a replica: all parameters of an expert."""
        return {name: t for name, t in self.named_parameters() if name not in OF_ROUTER}

    def _serve(self, arrivals: Arrivals, replicas: Replicas) -> torch.Tensor:
        """Return `[A, D]` outputs times gates, on home weights and on replicas."""
        begins, homes = arrivals.begins(), replicas.num_homes
        memory = replicas.served_rows(arrivals.rows)
        outputs = torch.empty_like(arrivals.rows) if memory is None else memory

        def serve(begin: int, end: int, counts: list[int], tensors: dict[str, Any]) -> None:
            rows, gates = arrivals.rows[begin:end], arrivals.gates[begin:end]
            outputs[begin:end] = self._compute(rows, gates, counts, tensors)

        if begins[homes]:
            counts = [end - begin for begin, end in pairwise(begins[: homes + 1])]
            serve(0, begins[homes], counts, self.bundle)
        for slot, (begin, end) in enumerate(pairwise(begins[homes:])):
            if begin < end:  # one by one: kernels assume contiguous experts
                weights = {name: t[slot : slot + 1] for name, t in replicas.tensors().items()}
                serve(begin, end, [end - begin], weights)
        return outputs

    def _compute(
        self,
        rows: torch.Tensor,
        gates: torch.Tensor,
        counts: list[int],
        tensors: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Run vLLM's kernel on `[n, D]` rows with these tensors, `counts` rows each."""
        each = moved(torch.tensor(counts), rows.device)
        ids = torch.arange(len(counts), dtype=torch.int32, device=rows.device)
        ids = ids.repeat_interleave(each, output_size=len(rows))
        outputs: torch.Tensor = self._kernel(tensors).apply(
            hidden_states=rows.contiguous(),
            w1=tensors["w13_weight"],
            w2=tensors["w2_weight"],
            topk_weights=gates[:, None].contiguous(),
            topk_ids=ids[:, None].contiguous(),
            activation=self.activation,
            global_num_experts=len(counts),
            expert_map=None,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
        )
        return outputs

    def _kernel(self, tensors: dict[str, torch.Tensor]) -> FusedMoEKernel:
        """Return vLLM's kernel for these tensors; biases are part of its configuration."""
        experts = self.quant_method.moe_kernel.fused_experts
        if "w13_bias" in tensors:
            experts = copy.copy(experts)
            overlay = Overlay(self, **tensors)
            experts.quant_config = self.quant_method.get_fused_moe_quant_config(overlay)
        return FusedMoEKernel(make_moe_prepare_and_finalize_no_dp_ep(False), experts)

    def load_weights(self, *inputs: Any, **options: Any) -> Any:
        """Load weights like vLLM; existing replicas become invalid."""
        self._weights_change()
        return super().load_weights(*inputs, **options)

    def weight_loader(self, *inputs: Any, **options: Any) -> Any:
        """Load one tensor like vLLM; existing replicas become invalid."""
        self._weights_change()
        return super().weight_loader(*inputs, **options)

    def _weights_change(self) -> None:
        if self.balancer is not None:
            self.balancer.weights_changed()

    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]
