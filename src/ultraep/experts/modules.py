"""Stage 6: Arrivals -> outputs, a network for every home and every filled spare slot.

    out = gate * down(activation(up(x)))

The gate of a row came with the row. Backward restores the weights of the copies (stage 3 again),
computes all gradients and adds those of the copies to their homes (stage 8). `Experts` does that by
its own products of all slots, for the networks that most models have; `ExpertsFrom` runs whatever
network there is through the seam of `loan.py`.

Shapes: A arrived rows, H home experts of this rank, D model width, F hidden width, U what goes into
the activation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn

from ultraep.bundle import Bundle, Layout, check_repeatable, stored_tensors, resolve
from ultraep.dispatch import Arrivals
from ultraep.errors import ConfigError, LoadError
from ultraep.experts.loan import Network, run, serve
from ultraep.experts.quantisable import QuantisableModule
from ultraep.microbatch import Replicas
from ultraep.ops.activations import activation_named
from ultraep.ops.modes import unseen
from ultraep.ops.products import Beside, Products, Stacks, TorchProducts, accumulator
from ultraep.ops.quantised import QuantisedProducts, QuantisedStacks
from ultraep.ops.recompute import Gradients, first_order, save
from ultraep.parallel.home import HomeModule

ENGINES = ("torch", "triton")
Weights = Mapping[str, torch.Tensor]
Engine = Products | QuantisedProducts


class Experts(QuantisableModule):
    """The home experts of one rank, stacked: two products with an activation between them.

    home_experts: which they are.   activation: see `ultraep.ops.activations.ACTIVATIONS`.
    seed: experts are drawn from it one by one, so a model starts alike on any number of ranks.
    bitwise: what a row gives does not depend on the rows beside it; somewhat slower on a CPU.
    engine: of the products, "torch" or "triton"; None: what is fastest where the rows are.
    quantised: a name of `ultraep.ops.formats.FORMATS`. Forward then multiplies in eight bits;
        replicas and rows that travel have them, too; full weights stay home and are trained.
    """

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        ffn: int,
        home_experts: list[int],
        *,
        activation: str = "swiglu",
        bias: bool = False,
        bitwise: bool = False,
        engine: str | None = None,
        quantised: str | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._set(home_experts, activation, bitwise, engine, quantised)
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        homes, up = len(home_experts), self.activation.inputs * ffn
        self.gate_up_proj = nn.Parameter(torch.empty(homes, up, hidden, **options))
        self.down_proj = nn.Parameter(torch.empty(homes, hidden, ffn, **options))
        for name, width in (("gate_up_bias", up), ("down_bias", hidden)):
            zeros = nn.Parameter(torch.zeros(homes, width, **options)) if bias else None
            self.register_parameter(name, zeros)
        self._draw(seed)

    def _set(
        self,
        home_experts: list[int],
        activation: str,
        bitwise: bool,
        engine: str | None,
        quantised: str | None,
    ) -> None:
        if engine is not None and engine not in ENGINES:
            raise ConfigError(f"unknown engine {engine!r}; known are {', '.join(ENGINES)}")
        self.activation = activation_named(activation)
        self.bitwise, self.engine, self.home_experts = bitwise, engine, tuple(home_experts)
        self._quantise_as(quantised)

    @classmethod
    def from_quantised(
        cls,
        quantised: str,
        tensors: Weights,
        home_experts: list[int],
        *,
        activation: str = "swiglu",
        bitwise: bool = False,
        engine: str | None = None,
    ) -> Self:
        """Experts that are given in eight bits, and do not learn: as checkpoints have them.

        tensors: `gate_up_proj` and `down_proj` `[H, N, K]` e4m3, `gate_up_scales` and
            `down_scales` as the format has them; perhaps `gate_up_bias` and `down_bias`.
        """
        experts = cls.__new__(cls)
        HomeModule.__init__(experts)
        experts._set(home_experts, activation, bitwise, engine, quantised)
        experts._take(tensors)
        for name in ("gate_up_bias", "down_bias"):
            given = tensors.get(name)
            held = None if given is None else nn.Parameter(given.detach(), requires_grad=False)
            experts.register_parameter(name, held)
        return experts

    def _draw(self, seed: int) -> None:
        for index, expert in enumerate(self.home_experts):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + expert)
            for stack in (self.gate_up_proj, self.down_proj):
                draw(stack[index], generator)

    def check(self, rows: torch.Tensor) -> None:
        """Refuse rows that do not fit, before anything is sent."""
        width = self.gate_up_proj.shape[2]
        if rows.shape[-1] != width:
            raise LoadError(f"tokens must be [..., {width}], got {list(rows.shape)}")

    def forward(self, arrivals: Arrivals, replicas: Replicas) -> torch.Tensor:
        """[A, D] outputs times their gates, inside of the `with` block of the replicas."""
        own = self._own()
        call = _Call(self._products(arrivals, replicas), replicas, tuple(own), self._eight_bits())
        outputs: torch.Tensor = _TwoProducts.apply(  # type: ignore[no-untyped-call]
            arrivals.rows, arrivals.gates, arrivals.packed, call, *own.values()
        )
        return outputs

    def _products(self, arrivals: Arrivals, replicas: Replicas) -> Engine:
        """The engine for these rows."""
        engine, rows, form = self.engine, arrivals.rows, self.form
        if engine is None:
            small = rows.dtype.itemsize <= 4  # kernels know no double precision
            engine = "triton" if replicas.kernels and small else "torch"
        if engine == "torch":
            plain = TorchProducts(arrivals.begins(), self.activation, bitwise=self.bitwise)
            return plain if form is None else QuantisedProducts(plain, form, rows.dtype)
        if form is not None:
            from ultraep.backends.triton.quantised import TritonQuantised

            return TritonQuantised(
                arrivals.offsets, self.activation, rows.dtype, form, replicas.sms
            )
        from ultraep.backends.triton.products import TritonProducts

        return TritonProducts(arrivals.offsets, self.activation, rows.dtype, replicas.sms)


class ExpertsFrom(HomeModule):
    """Experts that are any network of any framework, with the tensors that it has.

    network: `network(rows, counts, tensors)`, see `loan.serve`.
    tensors: a bundle, for the home experts of this rank; parameters of modules stay theirs, and
        are trained and saved there. Give functions, such as `lambda: module.up`, if the module may
        get new parameters, as in `load_state_dict(..., assign=True)`: a tensor given here is used
        for ever.
    home_experts: which they are.
    """

    def __init__(self, network: Network, tensors: Bundle, home_experts: list[int]) -> None:
        super().__init__()
        self.home_experts = tuple(home_experts)
        self._network, self._tensors = network, dict(tensors)
        self._tried: set[Any] = set()

    def home_parameters(self) -> list[nn.Parameter]:
        """Those among the tensors that are given as such."""
        return [t for t in stored_tensors(self._tensors) if isinstance(t, nn.Parameter)]

    def check_stacked(self) -> None:
        """Raise if a parameter holds one expert, so that nobody knows which by its name."""
        for name, given in self._tensors.items():
            if not callable(given) and not isinstance(given, torch.Tensor):
                raise ConfigError(
                    f"{name!r} is {len(given)} tensors, one for each home expert, and a checkpoint "
                    "of ShardedState wants one that is stacked over them"
                )

    pack = None  # rows travel as they are

    @property
    def bundle(self) -> Bundle:
        """What a copy of an expert consists of."""
        return self._tensors

    def current_bundle(self, promise: int) -> Bundle:
        """What a copy consists of, whatever is promised of the weights."""
        del promise
        return self._tensors

    @unseen()
    @torch.no_grad()
    def check(self, rows: torch.Tensor) -> None:
        """Refuse a network or functions that cannot be balanced, before anything is sent.

        The network runs on one row, once for every width, dtype and device of rows.
        """
        kind = (rows.shape[-1], rows.dtype, rows.device)
        if self.home_experts and kind not in self._tried:
            row, tensors = rows.new_zeros(1, rows.shape[-1]), resolve(self.bundle)
            Layout.of(tensors, len(self.home_experts))
            check_repeatable(self.bundle)
            run(self._network, row, [1] + [0] * (len(self.home_experts) - 1), tensors)
        self._tried.add(kind)

    def forward(self, arrivals: Arrivals, replicas: Replicas) -> torch.Tensor:
        """[A, D] outputs times their gates, inside of the `with` block of the replicas."""
        return serve(self._network, arrivals, replicas)


@dataclass
class _Call:
    """What the rows of one microbatch meet."""

    products: Engine
    replicas: Replicas
    names: tuple[str, ...]  # of the weights that learn
    eight_bits: dict[str, torch.Tensor] = field(default_factory=dict)  # what is multiplied instead

    def homes(self, learned: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the rows of home slots meet."""
        return dict(zip(self.names, learned, strict=True)) | self.eight_bits


class _TwoProducts(torch.autograd.Function):
    """The networks of all slots, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_AD: torch.Tensor,
        gates_A: torch.Tensor,
        packed: torch.Tensor | None,
        call: _Call,
        *stacked: torch.Tensor,
    ) -> torch.Tensor:
        products, homes = call.products, call.homes(stacked)
        held, given = call.replicas.tensors(), rows_AD if packed is None else packed
        if packed is None and isinstance(products, QuantisedProducts):
            given = products.packed(rows_AD)
        up = products.multiply(given, *_layer(homes, held, "gate_up"))
        outputs_AD = products.multiply(
            products.activate(up),
            *_layer(homes, held, "down"),
            scale=gates_A,
            out=call.replicas.served_rows(rows_AD),
        )
        ctx.like = rows_AD.new_empty(()).expand(rows_AD.shape)
        save(ctx, call, given, gates_A, up, *stacked)
        return outputs_AD

    @staticmethod
    @first_order
    def backward(
        ctx: Any, call: _Call, gradients: Gradients, saved: tuple[torch.Tensor, ...]
    ) -> Gradients:
        (d_outputs_AD,), (given, gates_A, up, *stacked) = gradients, saved
        assert d_outputs_AD is not None
        products, homes = call.products, call.homes(stacked)
        learned = dict(zip(call.names, stacked, strict=True))
        learns = any(ctx.needs_input_grad[4:])
        sums = _Gradients(call.replicas, learned, products.knows_spans) if learns else None
        with call.replicas as replicas:
            held = replicas.tensors()
            gate_up, (down, down_bias) = (_layer(homes, held, n) for n in ("gate_up", "down"))
            d_hidden = products.multiply_transposed(d_outputs_AD, down)
            d_up, hidden, d_gates_A = products.activate_backward(up, d_hidden, gates_A)
            if down_bias is not None and ctx.needs_input_grad[1]:
                products.row_dots(d_outputs_AD, down_bias, d_gates_A)
            if sums is not None:
                products.weight_gradients(d_outputs_AD, hidden, *sums.of("down"), scale=gates_A)
                products.weight_gradients(d_up, given, *sums.of("gate_up"))
            beside = None if sums is None else sums.reduce()
            d_rows_AD = products.multiply_transposed(
                d_up, gate_up[0], out=replicas.served_rows(ctx.like), beside=beside
            )
        wanted = sums.reduced() if sums is not None else [None] * len(stacked)
        return d_rows_AD, d_gates_A if ctx.needs_input_grad[1] else None, None, None, *wanted


def _layer(
    homes: Weights,
    copies: Weights,
    layer: str,
    sums: Weights | None = None,
    spans: torch.Tensor | None = None,
) -> tuple[Any, Stacks | None]:
    """Weights and biases of one layer of all slots, or their gradients.

    Weights are `Stacks`, or `QuantisedStacks` where there are scales.
    """

    def stacks(name: str) -> Stacks:
        return Stacks(homes[name].detach(), copies[name], sums[name] if sums else None, spans)

    weight, bias, scales = stacks(f"{layer}_proj"), f"{layer}_bias", f"{layer}_scales"
    found = QuantisedStacks(weight, stacks(scales)) if scales in homes else weight
    return found, stacks(bias) if bias in homes else None


class _Gradients:
    """Weight gradients of all slots, in the type they are summed in until that is done.

    Those of home experts to which nothing is added are rounded at once, if the engine knows which.
    """

    def __init__(self, replicas: Replicas, homes: Weights, knows_spans: bool) -> None:
        self._replicas, self._homes = replicas, homes
        kinds = {n: (tuple(w.shape[1:]), accumulator(w.dtype)) for n, w in homes.items()}
        if replicas.possible or knows_spans:
            self._of_copies = replicas.gradient_slots(kinds)
        else:  # of none, so that nobody clears memory for them
            self._of_copies = {n: w.new_empty(0, *w.shape[1:]) for n, w in homes.items()}
        wide = {n: kind for n, (_, kind) in kinds.items()}
        narrower = any(w.dtype != wide[n] for n, w in homes.items())
        apart = replicas.possible and knows_spans and narrower
        self._spans = replicas.spans() if apart else None
        self._own = {n: torch.empty_like(w, dtype=wide[n]) for n, w in homes.items() if apart}
        self._of_homes = {
            n: torch.empty_like(w, dtype=wide[n] if replicas.possible and not apart else w.dtype)
            for n, w in homes.items()
        }

    def of(self, layer: str) -> tuple[Any, Stacks | None]:
        """Where the gradients of one layer go."""
        return _layer(self._of_homes, self._of_copies, layer, self._own, self._spans)

    def reduce(self) -> Beside | None:
        """Begin to add those of the copies to those of the homes, beside the product to come."""
        if not self._replicas.possible:
            return None
        return self._replicas.reduce(self._of_homes, self._own or None, beside=True)

    def reduced(self) -> list[torch.Tensor]:
        """The gradients of the home experts, with those of all their copies."""
        self._replicas.reduced()
        return [self._of_homes[name].to(weight.dtype) for name, weight in self._homes.items()]


@torch.no_grad()
def draw(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a weight `[out, in]` evenly within 1 / sqrt(in), alike for every type and device."""
    drawn = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
    weight.copy_((2 * drawn - 1) / math.sqrt(weight.shape[-1]))
