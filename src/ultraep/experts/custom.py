"""Run any network of any framework as stage 6, on home weights and on replicas.

    outputs = serve(network, arrivals, replicas)

`network(rows, counts, tensors)` gets `[n, D]` rows, the number of rows of each expert, and the
tensors of these experts by name; it returns `[n, D]`. It runs twice: on the rows of the home slots
with the home weights, and on the remaining rows with the replicas in the spare slots. With `Fused`
it runs once, on all rows with the tensors of all slots. Two autograd functions enclose the network:

    forward     _Borrow -> network -> _GiveBack      inside the caller's `with` block
    backward    _GiveBack refills the slots, _Borrow reduces the gradients of replicas into the
                gradients of the home parameters

Autograd saves views of the slots. Other microbatches may overwrite the slots in between; backward
refills them before the network's backward reads these views.

Shapes: A arrived rows, H home experts, L spare slots, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.autograd import Variable

import ultraep.ops.products as plain
from ultraep.bundle import (
    Bundle,
    Layout,
    Stack,
    check_repeatable,
    check_trainable,
    flat_tensors,
    resolve,
    stacked_like,
    stored_tensors,
    tensors_of,
)
from ultraep.dispatch import Arrivals
from ultraep.errors import ConfigError, SlotError
from ultraep.ops.modes import outside_dispatch_modes, seen_by_modes
from ultraep.ops.recompute import Gradients, first_order, save
from ultraep.parallel.home import HomeModule
from ultraep.replicas import Replicas

Network: TypeAlias = Callable[[torch.Tensor, list[int], dict[str, Any]], torch.Tensor]


class Fused(NamedTuple):
    """Runs the network once, with one tensor per slot: home experts first, then spare slots.

    owners: parameters of the home experts, by name, if the network itself adds the gradients of
        these tensors to `main_grad`, as Transformer Engine does for Megatron-Core. The gradients
        of replicas are then added to the `main_grad` of the owners, and `grad` has no values.
    """

    owners: Mapping[str, Sequence[Any]] = {}


def serve(
    network: Network,
    arrivals: Arrivals,
    replicas: Replicas,
    weights: Sequence[torch.Tensor] | None = None,
    fused: Fused | None = None,
) -> torch.Tensor:
    """Return `[A, D]` outputs times gates. Call inside the `with` block of the replicas.

    weights: all tensors of the home experts, in place of those in the bundle.
    fused: how to run the network once instead of twice.
    """
    homes = resolve(replicas.bundle)
    if weights is not None:
        homes = stacked_like(homes, iter(weights))
    loan = _Loan(arrivals.begins(), replicas, homes, fused)
    borrowed = _Borrow.apply(loan, arrivals.rows, *loan.flat)  # type: ignore[no-untyped-call]
    parts = len(loan.parts)
    outputs = [
        run(network, rows, counts, weights)
        for rows, counts, weights in zip(
            borrowed[:parts], loan.counts, loan.weights(borrowed[parts:]), strict=True
        )
    ]
    if any(o.requires_grad for o in outputs) and not any(b.requires_grad for b in borrowed):
        raise ConfigError(
            "the network uses trainable tensors that are not in its bundle, so replicas would lack "
            f"them; add them to the bundle, which has {', '.join(loan.homes)}"
        )
    # Everything borrowed is an input, so that every rank takes part in the reduction.
    served: torch.Tensor = _GiveBack.apply(loan, arrivals.gates, *outputs, *borrowed)  # type: ignore[no-untyped-call]
    return served


def run(
    network: Network, rows: torch.Tensor, counts: list[int], weights: dict[str, Any]
) -> torch.Tensor:
    """Run the network and check the shape of its outputs; skip it without rows."""
    if not len(rows):
        return rows
    outputs = network(rows, counts, weights)
    if outputs.shape != rows.shape or outputs.dtype != rows.dtype:
        raise ConfigError(
            f"the network must return {list(rows.shape)} {rows.dtype}, got "
            f"{list(outputs.shape)} {outputs.dtype}"
        )
    return outputs


class ExpertsFrom(HomeModule):
    """Experts computed by any network of any framework.

    network: `network(rows, counts, tensors)`, see above.
    tensors: the bundle of the home experts of this rank. Parameters stay in their own modules,
        which train and save them. If a module may replace its parameters, for example by
        `load_state_dict(..., assign=True)`, pass functions such as `lambda: module.up`.
    home_experts: the experts of this rank.
    """

    pack = None  # rows travel unpacked

    def __init__(self, network: Network, tensors: Bundle, home_experts: list[int]) -> None:
        super().__init__()
        self.home_experts = tuple(home_experts)
        self._network, self.bundle = network, dict(tensors)
        self._checked: set[Any] = set()

    def home_parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the bundle."""
        return [t for t in stored_tensors(self.bundle) if isinstance(t, nn.Parameter)]

    def check_stacked(self) -> None:
        """Raise if the parameters are not stacked over the home experts."""
        for name, stack in self.bundle.items():
            if not callable(stack) and not isinstance(stack, torch.Tensor):
                raise ConfigError(
                    f"{name!r} is {len(stack)} tensors, one for each home expert; ShardedState "
                    "needs one tensor stacked over the experts"
                )

    @outside_dispatch_modes
    @torch.no_grad()
    def check(self, rows: torch.Tensor) -> None:
        """Raise if the network or the bundle cannot be balanced, before anything is sent.

        Runs the network on one row, once for every width, dtype and device of rows.
        """
        key = (rows.shape[-1], rows.dtype, rows.device)
        if self.home_experts and key not in self._checked:
            row, tensors = rows.new_zeros(1, rows.shape[-1]), resolve(self.bundle)
            Layout.of(tensors, len(self.home_experts))
            check_trainable(tensors)
            check_repeatable(self.bundle)
            run(self._network, row, [1] + [0] * (len(self.home_experts) - 1), tensors)
        self._checked.add(key)

    def weights(self) -> list[torch.Tensor]:
        return flat_tensors(resolve(self.bundle))

    def forward(
        self, arrivals: Arrivals, replicas: Replicas, weights: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return `[A, D]` outputs times gates. Call inside the `with` block of the replicas.

        weights: tensors in place of `weights()`.
        """
        return serve(self._network, arrivals, replicas, weights)


class _Loan:
    """The rows of one microbatch, with home weights and replicas."""

    def __init__(
        self, begins: list[int], replicas: Replicas, homes: Mapping[str, Stack], fused: Fused | None
    ) -> None:
        self.replicas, self.homes = replicas, homes
        self._owners = {} if fused is None else fused.owners
        self._fused: dict[str, list[Any]] = {}  # tensors of all slots with `main_grad`
        self._gradient_slots: dict[str, torch.Tensor] | None = None
        self.scaling: ModuleType = plain
        if replicas.kernels:
            from ultraep.backends.triton import scaling

            self.scaling = scaling
        self.flat = flat_tensors(homes)
        self._owner_of = {
            id(tensor): owner
            for name, owners in self._owners.items()
            for tensor, owner in zip(homes[name], owners, strict=True)
        }
        self.learning = [
            name for name, stack in homes.items() if any(t.requires_grad for t in tensors_of(stack))
        ]
        counts = [end - begin for begin, end in pairwise(begins)]
        homes_end = begins[replicas.num_homes]
        self.counts = [counts[: replicas.num_homes], counts[replicas.num_homes :]]
        self.parts = [slice(0, homes_end), slice(homes_end, begins[-1])]
        self._together = fused is not None
        if self._together:
            self.counts, self.parts = [counts], [slice(0, begins[-1])]
        self._addresses: list[int] = []
        self._open = False  # whether backward holds the slots
        # A dispatch mode may keep views of the slots and use them after they were overwritten.
        self._private = seen_by_modes()

    @outside_dispatch_modes
    def slot_tensors(self) -> dict[str, torch.Tensor]:
        """Return the `[L, ...]` replicas; in backward, in the same memory as in forward."""
        slots = self.replicas.tensors()
        if self._private:
            return {name: slots[name].clone() for name in self.homes}
        addresses = [tensor.data_ptr() for tensor in slots.values()]
        if self._addresses not in ([], addresses):
            raise SlotError(
                "backward needs the spare slots that forward used, but another microbatch holds "
                "them; finish that microbatch first"
            )
        self._addresses = addresses
        # `.data` has its own version counter: autograd must not see that the slots are refilled.
        return {name: slots[name].data for name in self.homes}

    def weights(self, borrowed: Iterable[torch.Tensor]) -> list[dict[str, Any]]:
        """Return the tensors for each run of the network, by name."""
        homes, replicas = self.by_name(borrowed)
        if not self._together:
            return [homes, replicas]
        for name in self._owners:  # autograd must not make gradients for these slots
            replicas[name] = [slot.detach() for slot in replicas[name]]
        together = {name: [*homes[name], *replicas[name]] for name in homes}
        self._fused = {name: together[name] for name in self._owners}
        self._lend_main_grads_of_homes()
        return [together]

    def by_name(self, tensors: Iterable[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return tensors of home experts and of replicas by name, in the form of the bundle."""
        flat, replicas = iter(tensors), {}
        homes = stacked_like(self.homes, flat)
        for name, stack in self.homes.items():
            slots = next(flat)
            unbound = slots is not None and not isinstance(stack, torch.Tensor)
            replicas[name] = list(slots.unbind()) if unbound else slots
        return homes, replicas

    def reduce(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """Stage 8: return the home gradients plus the gradients of all replicas."""
        own, of_replicas = gradients[: len(self.flat)], gradients[len(self.flat) :]
        sums = [self._writable(g, tensor) for g, tensor in zip(own, self.flat, strict=True)]
        if self.replicas.possible:
            homes, _ = self.by_name([*sums, *(None for _ in self.homes)])
            homes |= {name: [p.main_grad for p in owners] for name, owners in self._owners.items()}
            slots = self._gradient_slots or self.replicas.gradient_slots(self._gradient_specs())
            for name, gradient in zip(self.homes, of_replicas, strict=True):
                if name in slots and name not in self._owners:
                    slots[name].zero_() if gradient is None else slots[name].copy_(gradient)
            self.replicas.reduce({name: homes[name] for name in self.learning})
            self.replicas.reduced()
        for owner in self._owner_of.values():  # DDP must not add the gradient without values
            owner.grad_added_to_main_grad = True
        return [
            total if tensor.requires_grad else None
            for total, tensor in zip(sums, self.flat, strict=True)
        ]

    def _gradient_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the gradients of replicas."""
        like = self.replicas.tensors() | {n: o[0].main_grad[None] for n, o in self._owners.items()}
        return {name: (tuple(like[name].shape[1:]), like[name].dtype) for name in self.learning}

    def _lend_main_grads_of_homes(self) -> None:
        for name, owners in self._owners.items():
            for tensor, owner in zip(self._fused[name], owners, strict=False):
                tensor.main_grad = owner.main_grad
                tensor.overwrite_main_grad = getattr(owner, "overwrite_main_grad", False)

    def _lend_main_grads(self) -> None:
        """Let the network add gradients of replicas to cleared memory."""
        self._lend_main_grads_of_homes()
        self._gradient_slots = self.replicas.gradient_slots(self._gradient_specs())
        for name, tensors in self._fused.items():
            gradients = self._gradient_slots[name]
            if self.replicas.possible:
                gradients.zero_()
            for slot, gradient in zip(tensors[self.replicas.num_homes :], gradients, strict=True):
                slot.main_grad = gradient

    def enter(self) -> None:
        """Take the slots again for backward."""
        self.replicas.__enter__()
        self._open = True
        Variable._execution_engine.queue_callback(self.leave)
        if not self._private:
            self.slot_tensors()
        if self._owners:
            self._lend_main_grads()

    def leave(self) -> None:
        """Give the slots back; idempotent."""
        if self._open:
            self._open = False
            self.replicas.__exit__(None, None, None)

    def _writable(self, gradient: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
        """Return a gradient in its own memory: autograd may use one tensor twice."""
        owner = self._owner_of.get(id(tensor))
        if owner is not None and not getattr(owner, "zero_out_wgrad", False):
            return torch.empty_like(tensor)
        if gradient is None or owner is not None:
            return torch.zeros_like(tensor)
        if not self.replicas.possible:
            return gradient
        return gradient.clone(memory_format=torch.contiguous_format)


class _Borrow(torch.autograd.Function):
    """Returns rows, home weights and replicas; reduces their gradients in backward."""

    @staticmethod
    def forward(
        ctx: Any, loan: _Loan, rows_AD: torch.Tensor, *homes: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        save(ctx, loan)
        ctx.like = rows_AD.new_empty(()).expand(rows_AD.shape)
        ctx.set_materialize_grads(False)
        rows = [rows_AD[part] for part in loan.parts]
        views, slots = [home.view_as(home) for home in homes], loan.slot_tensors()
        fixed = [] if ctx.needs_input_grad[1] else [*rows]
        fixed += [v for v, home in zip(views, homes, strict=True) if not home.requires_grad]
        fixed += [stack for name, stack in slots.items() if name not in loan.learning]
        ctx.mark_non_differentiable(*fixed)
        return *rows, *views, *slots.values()

    @staticmethod
    @first_order
    def backward(ctx: Any, loan: _Loan, gradients: Gradients, _: Any) -> Gradients:
        d_homes: list[torch.Tensor | None] = [None] * len(loan.flat)
        d_rows_AD, parts = None, len(loan.parts)
        with outside_dispatch_modes():
            if loan.learning:
                d_homes = loan.reduce(gradients[parts:])
            if ctx.needs_input_grad[1]:
                d_rows_AD = _joined(loan, gradients[:parts], ctx.like)
        loan.leave()
        return None, d_rows_AD, *d_homes


class _GiveBack(torch.autograd.Function):
    """Multiplies outputs by gates; in backward, refills the slots before the network runs."""

    @staticmethod
    def forward(
        ctx: Any, loan: _Loan, gates_A: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        outputs = inputs[: len(loan.parts)]
        save(ctx, loan, gates_A, *outputs)
        with outside_dispatch_modes():
            like = outputs[0].new_empty(()).expand(len(gates_A), outputs[0].shape[1])
            memory = loan.replicas.served_rows(like)
            served_AD = torch.empty_like(like) if memory is None else memory
            for part, rows in zip(loan.parts, outputs, strict=True):
                loan.scaling.scale_rows(rows, gates_A[part], served_AD[part])
            return served_AD

    @staticmethod
    @first_order
    def backward(
        ctx: Any, loan: _Loan, gradients: Gradients, saved: tuple[torch.Tensor, ...]
    ) -> Gradients:
        (d_served,), (gates_A, *outputs) = gradients, saved
        assert d_served is not None
        borrowed = ctx.needs_input_grad[2 + len(loan.parts) :]
        if any(borrowed):  # else nothing needs the weights
            loan.enter()
        d_gates_A, backward = torch.zeros_like(gates_A), loan.scaling.scale_rows_backward
        d_outputs = [
            backward(d_served[part], output, gates_A[part], d_gates_A[part])
            for part, output in zip(loan.parts, outputs, strict=True)
        ]
        return None, d_gates_A, *d_outputs, *(None for _ in borrowed)


def _joined(loan: _Loan, parts: Gradients, like_AD: torch.Tensor) -> torch.Tensor:
    """Concatenate rows of home slots and of replicas to `[A, D]`; None is zero."""
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
