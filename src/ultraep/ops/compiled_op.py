"""The routed experts of a layer as one operation of a compiled graph.

A compiler cannot trace stages that exchange messages. `routed_experts` therefore appears in its
graphs as one operation, `ultraep::routed`, which runs the stages as they run without a compiler:

    forward     runs the stages with autograd and keeps the graph that autograd records; returns the
                outputs and a label of this graph
    backward    `ultraep::routed_backward` finds the graph by its label and differentiates it

The compiler sees all tensors that gradients flow to as inputs. So it returns the gradients of
weights to autograd, and hooks on parameters run as always. A graph is freed with its label: after
backward, or at once if backward computes the forward pass again.

Shapes: T tokens, K experts per token, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from itertools import count
from threading import Thread
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.library import custom_op

from ultraep.errors import ConfigError
from ultraep.ops.recompute import label_of, state_of

_numbers = count()
_layers: WeakValueDictionary[int, CompiledLayer] = WeakValueDictionary()


class CompiledLayer(Protocol):
    """A layer whose stages a compiled graph runs."""

    def run_routed(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        gates: torch.Tensor,
        weights: Sequence[torch.Tensor],
        policy: str | None,
    ) -> torch.Tensor:
        """Return `[T, D]` outputs for `[T, D]` tokens, computed with these weights."""


class _Recorded:
    """The outputs of a forward pass and the inputs that it was recorded for."""

    def __init__(self, outputs: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        self.outputs, self.inputs = outputs, inputs


def handle_of(layer: CompiledLayer) -> torch.Tensor:
    """Return a tensor that identifies the layer in compiled graphs.

    It is a tensor, not a number, so that layers of the same shape share one graph.
    """
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor([number], device="cpu")


def routed_experts(
    handle: torch.Tensor,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    weights: Sequence[torch.Tensor],
    policy: str | None = None,
) -> torch.Tensor:
    """Run the stages of the layer with this handle; for code that a compiler traces.

    weights: every tensor that gradients flow to.
    """
    device, inputs = tokens.device.type, (tokens, gates, *weights)
    learns = [torch.is_grad_enabled() and tensor.requires_grad for tensor in inputs]
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    outputs: torch.Tensor
    outputs, _ = _routed(handle, tokens, ids, gates, list(weights), learns, policy, autocast)
    return outputs


@custom_op("ultraep::routed", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def _routed(
    handle: torch.Tensor,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    weights: list[torch.Tensor],
    learns: list[bool],
    policy: str | None,
    autocast: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the stages; return the outputs and a label.

    learns: which of tokens, gates and weights require a gradient.
    """
    layer = _layers.get(int(handle))
    if layer is None:
        raise ConfigError("the layer of this compiled graph no longer exists; compile the new one")
    inputs = [t.detach() for t in (tokens, gates, *weights)]
    with ExitStack() as modes:
        if any(learns):
            modes.enter_context(_autograd())
            modes.enter_context(torch.enable_grad())
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                # The hooks of a checkpoint drop the label. It alone decides what backward uses.
                modes.enter_context(saved_tensors_hooks(_unchanged, _unchanged))
            inputs = [t.requires_grad_(learn) for t, learn in zip(inputs, learns, strict=True)]
        if autocast is not None:
            modes.enter_context(torch.autocast(tokens.device.type, autocast))
        tokens, gates, *weights = inputs
        outputs = layer.run_routed(tokens, ids, gates, weights, policy).contiguous()
    if not outputs.requires_grad:
        return outputs, torch.zeros(1, dtype=torch.int64)
    return outputs.detach(), label_of(_Recorded(outputs, inputs))


@_routed.register_fake
def _(handle: torch.Tensor, tokens: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens.new_empty(tokens.shape), torch.empty_like(handle)


@custom_op("ultraep::routed_backward", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def _routed_backward(
    d_outputs: torch.Tensor,
    label: torch.Tensor,
    gates: torch.Tensor,
    weights: list[torch.Tensor],
    learns: list[bool],
) -> list[torch.Tensor]:
    """Return the gradients of tokens, gates and weights, where one is required."""
    del gates, weights  # they only determine the shapes of the results
    recorded: _Recorded = state_of(label)
    inputs = [t for t, learn in zip(recorded.inputs, learns, strict=True) if learn]
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    with _autograd():
        gradients = torch.autograd.grad(
            recorded.outputs, inputs, d_outputs, retain_graph=keep, materialize_grads=True
        )
    return [gradient.contiguous() for gradient in gradients]


@_routed_backward.register_fake
def _(
    d_outputs: torch.Tensor,
    label: torch.Tensor,  # noqa: ARG001
    gates: torch.Tensor,
    weights: list[torch.Tensor],
    learns: list[bool],
) -> list[torch.Tensor]:
    inputs = zip((d_outputs, gates, *weights), learns, strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, learn in inputs if learn]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _, _, _, gates, weights, ctx.learns, _, _ = inputs
    ctx.save_for_backward(output[1], gates, *weights)  # the last ones for their shapes


def _differentiate(ctx: Any, d_outputs: torch.Tensor, _: Any) -> tuple[Any, ...]:
    label, gates, *weights = ctx.saved_tensors
    gradients = iter(_routed_backward(d_outputs, label, gates, weights, ctx.learns))
    d_tokens, d_gates, *d_weights = (next(gradients) if learn else None for learn in ctx.learns)
    return None, d_tokens, None, d_gates, d_weights, None, None, None


_routed.register_autograd(_differentiate, setup_context=_save_for_backward)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _autograd() -> Any:
    """Return a context in which torch records gradients, which it does not inside of operations."""
    return torch._C._ForceDispatchKeyGuard(*_default_keys())


@cache
def _default_keys() -> tuple[Any, Any]:
    """Return the included and excluded dispatch keys of a thread outside of all modes."""
    keys: list[Any] = []

    def read() -> None:
        keys.append(torch._C._dispatch_tls_local_include_set())
        keys.append(torch._C._dispatch_tls_local_exclude_set())

    thread = Thread(target=read)
    thread.start()
    thread.join()
    return keys[0], keys[1]
