"""The seam: any network of any framework serves the rows of stage 6, on home weights and on copies.

    outputs = serve(network, arrivals, replicas)

`network(rows, counts, tensors)` gets rows `[n, D]`, how many of them belong to each expert, and the
tensors of these experts by name; it returns `[n, D]`. It runs twice: the rows of home slots meet
the home weights, the rest meets the copies in the spare slots. Autograd knows both:

    forward     _Borrow  -> network -> _GiveBack     the slots are lent by the caller's `with` block
    backward    _GiveBack fills the slots again, _Borrow reduces the gradients of the copies into
                those of the home experts, which so arrive as gradients of the home parameters

What autograd keeps of the copies are views of the slots. They hold the right weights again when
backward comes, though others have been there meanwhile.

Shapes: A arrived rows, H home experts, L spare slots, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch.autograd import Variable

import ultraep.ops.products as plain
from ultraep.bundle import Stack, resolve, tensors_of
from ultraep.dispatch import Arrivals
from ultraep.errors import ConfigError, SlotError
from ultraep.microbatch import Replicas
from ultraep.ops.modes import seen_by_modes, unseen
from ultraep.ops.recompute import Gradients, first_order, save

Network: TypeAlias = Callable[[torch.Tensor, list[int], dict[str, Any]], torch.Tensor]


def serve(network: Network, arrivals: Arrivals, replicas: Replicas) -> torch.Tensor:
    """[A, D] outputs of all rows times their gates, inside of the `with` block of the replicas."""
    loan = _Loan(arrivals.begins(), replicas, resolve(replicas.bundle))
    borrowed = _Borrow.apply(loan, arrivals.rows, *loan.flat)  # type: ignore[no-untyped-call]
    outputs = [
        run(network, rows, counts, weights)
        for rows, counts, weights in zip(
            borrowed[:2], loan.counts, loan.by_name(borrowed[2:]), strict=True
        )
    ]
    if any(o.requires_grad for o in outputs) and not any(b.requires_grad for b in borrowed):
        raise ConfigError(
            "the network learns tensors that are not in its bundle, so that copies lack them: "
            f"the bundle has {', '.join(loan.homes)}"
        )
    # All that was borrowed goes through it, so that no rank skips the reduction of the others.
    served: torch.Tensor = _GiveBack.apply(loan, arrivals.gates, *outputs, *borrowed)  # type: ignore[no-untyped-call]
    return served


def run(
    network: Network, rows: torch.Tensor, counts: list[int], weights: dict[str, Any]
) -> torch.Tensor:
    """What the network makes of these rows; without rows it is not asked."""
    if not len(rows):
        return rows
    outputs = network(rows, counts, weights)
    if outputs.shape != rows.shape or outputs.dtype != rows.dtype:
        raise ConfigError(
            f"the network must return {list(rows.shape)} {rows.dtype}, got "
            f"{list(outputs.shape)} {outputs.dtype}"
        )
    return outputs


class _Loan:
    """The rows of one microbatch, and the weights that they meet."""

    def __init__(self, begins: list[int], replicas: Replicas, homes: Mapping[str, Stack]) -> None:
        self.replicas, self.homes = replicas, homes
        self.rows = _rows_by_kernels() if replicas.kernels else plain
        self.flat = [tensor for stack in homes.values() for tensor in tensors_of(stack)]
        self.learning = [
            name for name, stack in homes.items() if any(t.requires_grad for t in tensors_of(stack))
        ]
        counts = [end - begin for begin, end in pairwise(begins)]
        self.counts = counts[: replicas.num_homes], counts[replicas.num_homes :]
        self.parts = (
            slice(0, begins[replicas.num_homes]),
            slice(begins[replicas.num_homes], begins[-1]),
        )
        self._addresses: list[int] = []
        self._open = False  # in backward
        # A mode may keep views of the copies, and hand them out when others have the slots.
        self._private = seen_by_modes()

    @unseen()
    def held(self) -> dict[str, torch.Tensor]:
        """`[L, ...]` the copies; in backward where they were in forward."""
        held = self.replicas.tensors()
        if self._private:
            return {name: held[name].clone() for name in self.homes}
        addresses = [tensor.data_ptr() for tensor in held.values()]
        if self._addresses not in ([], addresses):
            raise SlotError(
                "backward needs the spare slots that forward had, but they are lent to another "
                "microbatch: let that finish first"
            )
        self._addresses = addresses
        # `.data`: another counter of writes, so that filling them again is nothing autograd minds.
        return {name: held[name].data for name in self.homes}

    def by_name(self, tensors: Iterable[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tensors of the home experts, then of the copies, in the form of the bundle."""
        given, homes, copies = iter(tensors), {}, {}
        for name, stack in self.homes.items():
            stacked = isinstance(stack, torch.Tensor)
            homes[name] = next(given) if stacked else [next(given) for _ in stack]
        for name, stack in self.homes.items():
            held = next(given)
            unbound = held is not None and not isinstance(stack, torch.Tensor)
            copies[name] = list(held.unbind()) if unbound else held
        return homes, copies

    def reduce(self, gradients: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """Stage 8: gradients of the home tensors, with those of all their copies."""
        own, of_copies = gradients[: len(self.flat)], gradients[len(self.flat) :]
        summed = [
            self._for_adding(gradient, tensor)
            for gradient, tensor in zip(own, self.flat, strict=True)
        ]
        wanted = [
            total if tensor.requires_grad else None
            for total, tensor in zip(summed, self.flat, strict=True)
        ]
        if not self.replicas.possible:
            return wanted
        homes, _ = self.by_name([*summed, *(None for _ in self.homes)])
        held = self.replicas.tensors()
        kinds = {n: (tuple(held[n].shape[1:]), held[n].dtype) for n in self.learning}
        slots = self.replicas.gradient_slots(kinds)
        for name, gradient in zip(self.homes, of_copies, strict=True):
            if name in slots:
                slots[name].zero_() if gradient is None else slots[name].copy_(gradient)
        self.replicas.reduce({name: homes[name] for name in self.learning})
        self.replicas.reduced()
        return wanted

    def enter(self) -> None:
        """Lend the slots again, for backward, whichever part of it there is."""
        self.replicas.__enter__()
        self._open = True
        Variable._execution_engine.queue_callback(self.leave)
        if not self._private:
            self.held()

    def leave(self) -> None:
        """Give them back, unless that was done."""
        if self._open:
            self._open = False
            self.replicas.__exit__(None, None, None)

    def _for_adding(self, gradient: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
        """A gradient of its own memory: autograd may use that of another one twice."""
        if gradient is None:
            return torch.zeros_like(tensor)
        if not self.replicas.possible:
            return gradient
        return gradient.clone(memory_format=torch.contiguous_format)


def _rows_by_kernels() -> ModuleType:
    """The kernels' way to scale rows, for whom they are there."""
    from ultraep.backends.triton import products as scale

    return scale


class _Borrow(torch.autograd.Function):
    """Hands out rows, home weights and copies; takes back their gradients."""

    @staticmethod
    def forward(
        ctx: Any, loan: _Loan, rows_AD: torch.Tensor, *homes: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        save(ctx, loan)
        ctx.like = rows_AD.new_empty(()).expand(rows_AD.shape)
        ctx.set_materialize_grads(False)
        rows = [rows_AD[part] for part in loan.parts]
        views, held = [home.view_as(home) for home in homes], loan.held()
        fixed = [] if ctx.needs_input_grad[1] else [*rows]
        fixed += [v for v, home in zip(views, homes, strict=True) if not home.requires_grad]
        fixed += [copy for name, copy in held.items() if name not in loan.learning]
        ctx.mark_non_differentiable(*fixed)
        return *rows, *views, *held.values()

    @staticmethod
    @first_order
    def backward(ctx: Any, loan: _Loan, gradients: Gradients, _: Any) -> Gradients:
        wanted: list[torch.Tensor | None] = [None] * len(loan.flat)
        d_rows_AD = None
        with unseen():
            if loan.learning:
                wanted = loan.reduce(gradients[2:])
            if ctx.needs_input_grad[1]:
                d_rows_AD = _joined(loan, gradients[:2], ctx.like)
        loan.leave()
        return None, d_rows_AD, *wanted


class _GiveBack(torch.autograd.Function):
    """Takes what the network made of the rows; in backward, fills the slots before it runs."""

    @staticmethod
    def forward(ctx: Any, loan: _Loan, gates_A: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        outputs = given[:2]
        save(ctx, loan, gates_A, *outputs)
        with unseen():
            like = outputs[0].new_empty(()).expand(len(gates_A), outputs[0].shape[1])
            memory = loan.replicas.served_rows(like)
            served_AD = torch.empty_like(like) if memory is None else memory
            for part, rows in zip(loan.parts, outputs, strict=True):
                loan.rows.scale_rows(rows, gates_A[part], served_AD[part])
            return served_AD

    @staticmethod
    @first_order
    def backward(
        ctx: Any, loan: _Loan, gradients: Gradients, saved: tuple[torch.Tensor, ...]
    ) -> Gradients:
        (d_served,), (gates_A, *outputs) = gradients, saved
        assert d_served is not None
        if any(ctx.needs_input_grad[4:]):  # else backward ends here, and needs no weights
            loan.enter()
        d_outputs, d_gates_A = [], torch.zeros_like(gates_A)
        for part, output in zip(loan.parts, outputs, strict=True):
            given = d_served[part], output, gates_A[part], d_gates_A[part]
            d_outputs.append(loan.rows.scale_rows_backward(*given))
        return None, d_gates_A, *d_outputs, *(None for _ in ctx.needs_input_grad[4:])


def _joined(
    loan: _Loan, parts: tuple[torch.Tensor | None, ...], like_AD: torch.Tensor
) -> torch.Tensor:
    """[A, D] rows of home slots and of copies together; zeros for None."""
    memory, homes = loan.replicas.served_rows(like_AD), parts[0]
    if memory is None and homes is not None and len(homes) == len(like_AD):
        return homes
    rows_AD = torch.empty_like(like_AD) if memory is None else memory
    for part, rows in zip(loan.parts, parts, strict=True):
        if rows is None:
            rows_AD[part].zero_()
        else:
            rows_AD[part].copy_(rows)
    return rows_AD
