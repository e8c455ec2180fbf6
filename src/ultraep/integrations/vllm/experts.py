"""Balanced experts for vLLM, on home weights and on replicas.

vLLM looks up the class of a layer in a registry. The balanced class is a subclass of vLLM's, which
keeps its loading, quantisation and kernels, and overrides only the forward pass. It receives the
logical ids of the router, so routes that vLLM records stay logical.

On GPUs vLLM calls it inside of its opaque operation `vllm::moe_forward`. On CPUs the compiler
traces it, and it calls an opaque operation of its own.

Shapes: T tokens, K experts per token, A arrived rows, n of them, D model width.
"""

from __future__ import annotations

import copy
import os
from itertools import pairwise
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

from ultraep.comm import moved
from ultraep.dispatch import Arrivals
from ultraep.integrations.common import Overlay, run_layer
from ultraep.integrations.vllm.service import Service
from ultraep.integrations.vllm.settings import read_settings
from ultraep.integrations.vllm.tensors import Carried, carry_experts
from ultraep.microbatch import AnyPlan, Layer
from ultraep.replicas import Replicas
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


@torch.library.custom_op("ultraep::vllm_experts", mutates_args=())
def vllm_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    """Run the experts of a layer; the compiler does not look inside."""
    layer = get_forward_context().no_compile_layers[layer_name].routed_experts
    outputs: torch.Tensor = layer.run(x, topk_weights, topk_ids)
    return outputs


vllm_experts.register_fake(lambda x, *_: torch.empty_like(x))


class BalancedRows(RoutedExperts):  # type: ignore[misc]
    """A mixin for vLLM's experts: home experts of this rank plus replicas for a batch.

    balancer, layer_index: the balancer and the index of the layer, if it is balanced.
    last_plan: the plan of the last batch.
    """

    balancer: Balancer | None = None
    layer_index: int
    last_plan: AnyPlan | None = None
    _carried: dict[str, Carried] | None = None

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
        return self._stages(x, topk_weights, topk_ids)

    def forward_monolithic(self, *inputs: Any, **options: Any) -> Any:
        """Run kernels that route by themselves, which are never balanced."""
        if self.service is not None and not torch.compiler.is_compiling():
            assert not self.service.ready, "layers whose kernels route by themselves are refused"
        return super().forward_monolithic(*inputs, **options)

    def _stages(self, x: torch.Tensor, gates: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        assert self.balancer is not None
        assert self.service is not None
        layer = Layer(self.layer_index, self.bundle, self._serve)
        policy = self.service.policy(self.balancer)
        return run_layer(self, layer, ids, gates, x, policy=policy)

    @property
    def carried(self) -> dict[str, Carried]:
        """The tensors of the experts as replicas hold them."""
        if self._carried is None or any(
            getattr(self, carried.names[0]) is not carried.tensor
            for carried in self._carried.values()
        ):
            self._carried = carry_experts(self)
        return self._carried

    @property
    def bundle(self) -> dict[str, torch.Tensor]:
        """The tensors of a replica: all tensors of an expert."""
        return {name: carried.stack for name, carried in self.carried.items()}

    def _serve(self, arrivals: Arrivals, replicas: Replicas) -> torch.Tensor:
        """Return `[A, D]` outputs times gates, on home weights and on replicas."""
        begins, homes = arrivals.begins(), replicas.num_homes
        memory = replicas.served_rows(arrivals.rows)
        outputs = torch.empty_like(arrivals.rows) if memory is None else memory

        def serve(begin: int, end: int, counts: list[int], experts: Any) -> None:
            rows, gates = arrivals.rows[begin:end], arrivals.gates[begin:end]
            outputs[begin:end] = self._compute(rows, gates, counts, experts)

        if begins[homes]:
            counts = [end - begin for begin, end in pairwise(begins[: homes + 1])]
            serve(0, begins[homes], counts, self)
        for slot, (begin, end) in enumerate(pairwise(begins[homes:])):
            if begin < end:  # one by one: kernels assume contiguous experts
                serve(begin, end, [end - begin], self.replica(replicas.tensors(), slot))
        return outputs

    def replica(self, tensors: dict[str, torch.Tensor], slot: int) -> Overlay:
        """Return this layer with the tensors of one slot."""
        attributes = {}
        for name, carried in self.carried.items():
            restored = carried.restore(tensors[name][slot : slot + 1])
            attributes.update(dict.fromkeys(carried.names, restored))
        return Overlay(self, **attributes)

    def _compute(
        self, rows: torch.Tensor, gates: torch.Tensor, counts: list[int], experts: Any
    ) -> torch.Tensor:
        """Run vLLM's kernel on `[n, D]` rows, `counts` rows for each expert of this layer."""
        each = moved(torch.tensor(counts), rows.device)
        ids = torch.arange(len(counts), dtype=torch.int32, device=rows.device)
        ids = ids.repeat_interleave(each, output_size=len(rows))
        outputs: torch.Tensor = self._kernel(experts).apply(
            hidden_states=rows.contiguous(),
            w1=experts.w13_weight,
            w2=experts.w2_weight,
            topk_weights=gates[:, None].contiguous(),
            topk_ids=ids[:, None].contiguous(),
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
