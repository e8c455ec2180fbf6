"""Experts of vLLM on home weights and on copies: what takes the place of its `RoutedExperts`.

vLLM asks its registry for the class of a layer when it makes one. Ours is derived from its own, so
that loading, quantisation and kernels are vLLM's; it computes otherwise only where it balances.

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
from ultraep.integrations.common import InPlaceOf
from ultraep.integrations.vllm.refusals import OF_ROUTER
from ultraep.integrations.vllm.service import Service
from ultraep.integrations.vllm.settings import read_settings
from ultraep.layer import run_stages
from ultraep.microbatch import AnyPlan, Layer, Replicas
from ultraep.runtime.balancer import Balancer

_current: Service | None = None  # of the model that is being made


def install() -> None:
    """Have vLLM make balanced experts from now on; again is nothing.

    Its registry goes by the name of a class, and gpt-oss has one of its own.
    """
    for kind in (RoutedExperts, GptOssRoutedExperts):
        if kind.__name__ not in op_registry_oot:
            made = type(f"Balanced{kind.__name__}", (BalancedRows, kind), {})
            op_registry_oot[kind.__name__] = made


def service_for(config: Any) -> Service | None:
    """That of this model; None: nothing was asked for."""
    global _current
    settings = read_settings(os.environ, config.additional_config)
    if settings is None:
        return None
    if _current is None or _current.config is not config:
        _current = Service(config, settings)
    return _current


class BalancedRows(RoutedExperts):  # type: ignore[misc]
    """The home experts of this rank, and copies of others for a batch.

    Stands before the class of vLLM that it balances.
    balancer, layer_index: who balances it, and its number there, if it is.
    last_plan: of the last batch.
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
        """[T, D] -> [T, D]; `[T, K]` gates and ids of experts. Shared experts are run by others."""
        if self.service is None or not self.service.ready:
            given = x, topk_weights, topk_ids, shared_experts, shared_experts_input
            return super().forward_modular(*given)
        return self._stages(x, topk_weights, topk_ids)

    def forward_monolithic(self, *inputs: Any, **options: Any) -> Any:
        """Kernels that route by themselves are left alone, which is said."""
        if self.service is not None:
            assert not self.service.ready, "kernels that route by themselves are refused"
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
        """What a copy of an expert consists of: all that vLLM keeps for one."""
        return {name: t for name, t in self.named_parameters() if name not in OF_ROUTER}

    def _serve(self, arrivals: Arrivals, replicas: Replicas) -> torch.Tensor:
        """[A, D] outputs of all rows times their gates, on home weights and on copies."""
        begins, homes = arrivals.begins(), replicas.num_homes
        memory = replicas.served_rows(arrivals.rows)
        outputs = torch.empty_like(arrivals.rows) if memory is None else memory

        def serve(begin: int, end: int, counts: list[int], tensors: dict[str, Any]) -> None:
            given = arrivals.rows[begin:end], arrivals.gates[begin:end]
            outputs[begin:end] = self._compute(*given, counts, tensors)

        if begins[homes]:
            counts = [end - begin for begin, end in pairwise(begins[: homes + 1])]
            serve(0, begins[homes], counts, self.bundle)
        for slot, (begin, end) in enumerate(pairwise(begins[homes:])):
            if begin < end:  # one by one: kernels take experts that stand apart for neighbours
                lent = {name: t[slot : slot + 1] for name, t in replicas.tensors().items()}
                serve(begin, end, [end - begin], lent)
        return outputs

    def _compute(
        self,
        rows: torch.Tensor,
        gates: torch.Tensor,
        counts: list[int],
        tensors: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """[n, D] -> [n, D] by the kernel of vLLM, with these tensors for so many rows each."""
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
        """The kernel of vLLM for experts of one rank; biases are part of how it is configured."""
        experts = self.quant_method.moe_kernel.fused_experts
        if "w13_bias" in tensors:
            experts = copy.copy(experts)
            seen = InPlaceOf(self, **tensors)
            experts.quant_config = self.quant_method.get_fused_moe_quant_config(seen)
        return FusedMoEKernel(make_moe_prepare_and_finalize_no_dp_ep(False), experts)

    def load_weights(self, *inputs: Any, **options: Any) -> Any:
        """Loads as vLLM does; copies of what was there before serve no more."""
        self._weights_change()
        return super().load_weights(*inputs, **options)

    def weight_loader(self, *inputs: Any, **options: Any) -> Any:
        """Loads one tensor as vLLM does; copies of what was there before serve no more."""
        self._weights_change()
        return super().weight_loader(*inputs, **options)

    def _weights_change(self) -> None:
        if self.balancer is not None:
            self.balancer.weights_changed()

    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]
