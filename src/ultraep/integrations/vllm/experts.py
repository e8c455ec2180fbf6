"""Balanced experts for vLLM, on home weights and on replicas.

vLLM looks up the class of a layer in a registry. The balanced class is a subclass of vLLM's, which
keeps its loading, quantisation and kernels, and overrides only the forward pass. It receives the
logical ids of the router, so routes that vLLM records stay logical.

On GPUs vLLM calls it inside of its opaque operation `vllm::moe_forward`. On CPUs the compiler
traces it, and it calls an opaque operation of its own.

Shapes: T tokens, K experts per token, n arrived rows, D model width.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts, FusedMoEKernel
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    make_moe_prepare_and_finalize_no_dp_ep,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

from ultraep.integrations.serving.experts import ServedExperts, ids_of_rows
from ultraep.integrations.serving.settings import read_settings
from ultraep.integrations.vllm.service import Service

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


@torch.library.custom_op("ultraep::vllm_experts", mutates_args=())
def vllm_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    """Run the experts of a layer; the compiler does not look inside."""
    layer = get_forward_context().no_compile_layers[layer_name].routed_experts
    outputs: torch.Tensor = layer.run(x, topk_weights, topk_ids)
    return outputs


vllm_experts.register_fake(lambda x, *_: torch.empty_like(x))


class BalancedRows(ServedExperts, RoutedExperts):  # type: ignore[misc]
    """A mixin for vLLM's experts: home experts of this rank plus replicas for a batch."""

    service: Service | None

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
        if self.service is not None and torch.compiler.is_compiling():
            # On CPUs, vLLM runs shared experts before the routed ones.
            return vllm_experts(x, topk_weights, topk_ids, self.layer_name)
        return self.run(x, topk_weights, topk_ids, shared_experts, shared_experts_input)

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> Any:
        """Run a batch outside of compiled code, balanced or as vLLM does."""
        if self.service is None or not self.service.ready or self.service.leaves(self):
            return super().forward_modular(
                x, topk_weights, topk_ids, shared_experts, shared_experts_input
            )
        if shared_experts is not None:  # runs only if vLLM leaves them to the kernel
            shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
        return self.run_balanced(x, topk_weights, topk_ids)

    def forward_monolithic(self, *inputs: Any, **options: Any) -> Any:
        """Run kernels that route by themselves, which are never balanced."""
        if self.service is not None and not torch.compiler.is_compiling():
            assert not self.service.ready, "layers whose kernels route by themselves are refused"
        return super().forward_monolithic(*inputs, **options)

    @property
    def num_homes(self) -> int:
        """Number of home experts of this rank."""
        return int(self.local_num_experts)

    def compute(
        self, rows: torch.Tensor, gates: torch.Tensor, counts: list[int], experts: Any
    ) -> torch.Tensor:
        """Run vLLM's kernel on `[n, D]` rows, `counts` rows for each expert of `experts`."""
        outputs: torch.Tensor = self._kernel(experts).apply(
            hidden_states=rows.contiguous(),
            w1=experts.w13_weight,
            w2=experts.w2_weight,
            topk_weights=gates[:, None].contiguous(),
            topk_ids=ids_of_rows(counts, rows),
            activation=self.activation,
            global_num_experts=len(counts),
            expert_map=None,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
        )
        return outputs

    def _kernel(self, experts: Any) -> FusedMoEKernel:
        """Return vLLM's kernel for these experts; its configuration holds scales and biases."""
        kernel = self.quant_method.moe_kernel.fused_experts
        if experts is not self:
            config = self.quant_method.get_fused_moe_quant_config(experts)
            kernel = with_quant_config(kernel, config)
        return FusedMoEKernel(make_moe_prepare_and_finalize_no_dp_ep(False), kernel)


def with_quant_config(kernel: Any, config: Any) -> Any:
    """Return the kernel, and the kernels that it chooses from, with this configuration."""
    kernel = copy.copy(kernel)
    kernel.quant_config = config
    for name, value in vars(kernel).items():
        if isinstance(value, FusedMoEExperts):
            setattr(kernel, name, with_quant_config(value, config))
    return kernel
