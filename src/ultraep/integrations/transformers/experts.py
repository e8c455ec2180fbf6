"""Experts of a transformers model, spread over ranks.

Balancing changes the class of an experts module to a subclass of its own class and of
`BalancedExperts`. Its parameters then hold the home experts of this rank and its forward runs the
stages. The library's own functions still compute the experts, on home weights and on replicas,
also if it has quantised them (`quantised.py`).

Shapes: T tokens, K experts per token, E experts, n rows, D model width.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache, partial
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.integrations.moe import _grouped_linear

from ultraep.arrays import PADDING
from ultraep.bundle import Bundle
from ultraep.comm import moved
from ultraep.errors import ConfigError
from ultraep.experts.custom import serve
from ultraep.integrations.common import Overlay, expect_layer, run_layer, stays_unchanged
from ultraep.integrations.transformers.quantised import (
    MXFP4_ROUTED,
    FP8Experts,
    Mxfp4Experts,
    fp8_product,
    freeze_fp8,
    memory_of,
    mxfp4_choices,
    mxfp4_network,
    triton_tensors,
    with_memory,
)
from ultraep.microbatch import AnyPlan, Layer
from ultraep.parallel.home import HomeModule
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.state import gather_experts

GROUPED = "grouped_mm"  # the library's grouped matrix products
FEW_TOKENS = 4096  # with one rank and fewer tokens, the library is faster (bench_blocks.py)


def is_registered(module: nn.Module) -> bool:
    """Return whether the module is in the library's registry of experts, or is MXFP4 experts."""
    registered = hasattr(module, "is_concatenated") and hasattr(module, "has_gate")
    return registered or isinstance(module, Mxfp4Experts)


class BalancedExperts(HomeModule):
    """The home experts of this rank, in a module of the library.

    original_class: its class before balancing.
    balancer, layer_index: its balancer, and its index there.
    stacked: names of the tensors that are stacked over experts.
    last_plan: the plan of the last microbatch.
    """

    original_class: type[nn.Module]
    stacked: tuple[str, ...]
    balancer: Balancer
    layer_index: int
    last_plan: AnyPlan | None

    def __deepcopy__(self, memo: dict[int, Any]) -> BalancedExperts:
        """Copy the weights. The copy is another layer of the same balancer."""
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__setstate__(deepcopy(self.__dict__, memo))
        copied.layer_index = self.balancer.register_layer()
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "a balanced model cannot be pickled, because its experts are spread over running "
            "processes: call model.save_pretrained(), torch.save(model.state_dict()) for the "
            "experts of this rank, or unbalance(model) first"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Map `[T, D]` to `[T, D]`, with `[T, K]` expert ids and gates."""
        if len(hidden_states) < FEW_TOKENS and stays_unchanged(self.balancer):
            library: Any = self.original_class.forward
            outputs: torch.Tensor = library(self, hidden_states, top_k_index, top_k_weights)
            return outputs
        return stages(self, self.bundle, hidden_states, top_k_index, top_k_weights)

    @property
    def bundle(self) -> dict[str, torch.Tensor]:
        """The tensors of a replica: all tensors stacked over experts."""
        changed = sorted(stacked_tensors(self).keys() ^ set(self.stacked))
        if changed and not isinstance(self, Mxfp4Experts):  # Triton tensors replace parameters
            raise ConfigError(
                f"{', '.join(changed)} of {self.original_class.__name__} changed after balancing: "
                "adapters of experts (LoRA) cannot be balanced; adapt other layers only"
            )
        freeze_fp8(self)
        return bundle_of(self)

    def home_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of single experts; parameters that experts share are dense."""
        return [p for p in self._parameters.values() if p is not None]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def forward_routed(
    experts: Any, hidden_states: torch.Tensor, routing_data: Any, gather_idx: Any, scatter_idx: Any
) -> torch.Tensor:
    """Run MXFP4 experts, for which the library passes its routing instead of expert ids."""
    del scatter_idx  # the inverse of gather_idx
    return stages(experts, experts.bundle, hidden_states, *mxfp4_choices(routing_data, gather_idx))


def bundle_of(experts: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors stacked over experts; for MXFP4, biases and memory of Triton tensors."""
    triton = triton_tensors(experts) if isinstance(experts, Mxfp4Experts) else {}
    return stacked_tensors(experts) | {name: memory_of(t) for name, t in triton.items()}


def stages(
    experts: Any, bundle: Bundle, tokens: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """Run the stages of a balanced module; return `[T, D]` outputs."""
    balancer: Balancer = experts.balancer
    # The library marks padding by ids beyond the last expert.
    ids = ids.masked_fill(ids >= balancer.topology.experts, PADDING)
    network = mxfp4_network if isinstance(experts, Mxfp4Experts) else compute
    run = partial(serve, partial(network, experts))
    return run_layer(experts, Layer(experts.layer_index, bundle, run), ids, gates, tokens)


def compute(
    experts: Any, rows: torch.Tensor, counts: list[int], tensors: dict[str, Any]
) -> torch.Tensor:
    """Run the library's experts on `[n, D]` rows with these tensors, `counts` rows each."""
    if isinstance(experts, FP8Experts):  # its kernels need contiguous tensors; one slot is
        rows, tensors = rows.contiguous(), {n: t.contiguous() for n, t in tensors.items()}
    overlay = Overlay(experts, num_experts=len(counts), **tensors)
    if experts.config._experts_implementation == GROUPED:
        return grouped_mm(overlay, rows, counts)
    each = moved(torch.tensor(counts), rows.device)
    ids = torch.arange(len(counts), device=rows.device)
    ids = ids.repeat_interleave(each, output_size=len(rows))
    ones = rows.new_ones(len(rows), 1)
    outputs: torch.Tensor = experts.original_class.forward(overlay, rows, ids[:, None], ones)
    return outputs


def grouped_mm(experts: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Compute like the library's "grouped_mm", for rows already sorted by expert."""
    ends = moved(torch.tensor(list(accumulate(counts)), dtype=torch.int32), rows.device)
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    hidden = _product(experts, first, rows, counts, ends)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    outputs = _product(experts, "down_proj", hidden, counts, ends)
    if getattr(experts, "has_post_expert_norm", False):  # since 5.22
        outputs = experts.post_expert_norm(outputs)
    return outputs.to(rows.dtype)


def _product(
    experts: Any, name: str, rows: torch.Tensor, counts: list[int], ends: torch.Tensor
) -> torch.Tensor:
    """Multiply rows by the weights of their experts."""
    if hasattr(experts, f"{name}_scale_inv"):
        return fp8_product(experts, name, rows, counts, ends)
    bias = None
    if experts.has_bias:
        each = moved(torch.tensor(counts), rows.device)
        stacked = getattr(experts, f"{name}_bias")
        bias = stacked.repeat_interleave(each, dim=0, output_size=len(rows))
    product: torch.Tensor = _grouped_linear(
        rows, getattr(experts, name), offs=ends, bias=bias, is_transposed=experts.is_transposed
    )
    return product


def balanced_experts(model: nn.Module) -> dict[str, BalancedExperts]:
    """Return the balanced modules of a model, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, BalancedExperts)}


def expert_owners(model: nn.Module) -> dict[str, BalancedExperts]:
    """Return the balanced module of each expert tensor, by the name of the tensor."""
    modules = balanced_experts(model).items()
    return {f"{name}.{key}".lstrip("."): m for name, m in modules for key in m.bundle}


def stacked_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the direct parameters and buffers of a module, by name."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


@cache
def balanced_class(original: Any) -> type[BalancedExperts]:
    """Return the balanced subclass of a class of experts."""
    own = {MXFP4_ROUTED: forward_routed} if issubclass(original, Mxfp4Experts) else {}
    own |= {"original_class": original}
    return type(f"Balanced{original.__name__}", (BalancedExperts, original), own)


@torch.no_grad()
def spread(module: Any, balancer: Balancer) -> None:
    """Keep only the home experts of this rank and change the class of the module."""
    homes = tuple(balancer.topology.home_experts(balancer.rank).tolist())
    for tensor in stacked_tensors(module).values():
        if len(homes) < len(tensor):  # copies, which frees the other experts
            tensor.data = tensor.data[list(homes)]
    if isinstance(module, Mxfp4Experts):
        memory = {n: memory_of(t)[list(homes)] for n, t in triton_tensors(module).items()}
        vars(module).update(with_memory(module, memory))
    original: Any = type(module)
    module.__class__ = balanced_class(original)
    module.home_experts, module.balancer, module.last_plan = homes, balancer, None
    module.stacked = tuple(stacked_tensors(module))
    module.layer_index = balancer.register_layer()
    expect_layer(balancer)
    module.spread_over(balancer)


@torch.no_grad()
def reunite(module: Any) -> None:
    """Undo `spread`. Collective."""
    if isinstance(module, Mxfp4Experts):
        memory = {n: memory_of(t) for n, t in triton_tensors(module).items()}
        memory = {n: gather_experts(t, module.balancer) for n, t in memory.items()}
        vars(module).update(with_memory(module, memory))
    for tensor in stacked_tensors(module).values():
        tensor.data = gather_experts(tensor, module.balancer)
        tensor.__dict__.pop("expert_ranks", None)
    for name in ("home_experts", "stacked", "balancer", "last_plan", "layer_index", "ranks"):
        delattr(module, name)
    module.__class__ = module.original_class
