"""Stage 6: run the network of every home slot and every filled spare slot.

    out = gate * down(activation(up(x)))

The gate of a row arrives with the row. Backward refills the spare slots (stage 3), computes all
gradients, and adds the gradients of replicas to their home experts (stage 8). `Experts` computes
all slots with its own grouped products; `ExpertsFrom` (`custom.py`) runs any other network.

Shapes: A arrived rows, H home experts of this rank, D model width, F hidden width, U width of the
activation's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from ultraep.backends import has_kernels
from ultraep.config import check_choice
from ultraep.dispatch import Arrivals
from ultraep.errors import ConfigError, LoadError
from ultraep.ops.fp8 import E4M3, SCALES, Quantise, pack, quantise
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.ops.products import Beside, Stacks, TorchProducts, accumulator, activation_named
from ultraep.ops.recompute import UNTRACKED, Gradients, first_order, run, save
from ultraep.parallel.home import HomeModule
from ultraep.replicas import Replicas

if TYPE_CHECKING:
    from ultraep.backends.triton.products import TritonProducts

ENGINES = ("torch", "triton")
BIASES = ("gate_up_bias", "down_bias")
FORMATS = ("fp8",)
QUANTISED = (*SCALES, *SCALES.values())  # codes and scales
Weights = Mapping[str, torch.Tensor]


class Experts(HomeModule):
    """The home experts of one rank, stacked: two products with an activation in between.

    home_experts: the experts of this rank.
    activation: a name of `ultraep.ops.products.ACTIVATIONS`.
    seed: each expert is drawn from the seed and its own number, so a model starts with the same
        weights on any number of ranks.
    bitwise: the output of a row does not depend on the rows beside it; slower on a CPU.
    engine: "torch" or "triton"; None: the faster one on the device of the rows.
    quantised: "fp8" or None. Forward multiplies in FP8 (e4m3), and replicas and rows travel in
        FP8. The full weights stay at home, are trained and are quantised in every microbatch;
        `freeze` quantises them once.
    """

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    gate_up_scales: nn.Parameter | None  # of frozen FP8 weights
    down_scales: nn.Parameter | None
    _codes: dict[str, torch.Tensor]  # FP8 codes and scales of trained weights

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
        if engine is not None:
            check_choice("engine", engine, ENGINES)
        if quantised is not None:
            check_choice("quantised", quantised, FORMATS)
        self.activation = activation_named(activation)
        self.bitwise, self.engine, self.home_experts = bitwise, engine, tuple(home_experts)
        self.fp8, self._codes = quantised is not None, {}
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        homes, up = len(home_experts), self.activation.inputs * ffn
        self.gate_up_proj = nn.Parameter(torch.empty(homes, up, hidden, **options))
        self.down_proj = nn.Parameter(torch.empty(homes, hidden, ffn, **options))
        for name, width in zip(BIASES, (up, hidden), strict=True):
            zeros = nn.Parameter(torch.zeros(homes, width, **options)) if bias else None
            self.register_parameter(name, zeros)
        for name in SCALES.values():
            self.register_parameter(name, None)
        for index, expert in enumerate(home_experts):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + expert)
            for stack in (self.gate_up_proj, self.down_proj):
                draw(stack[index], generator)

    def freeze(self) -> Self:
        """Quantise the weights to FP8 once, and drop the full weights: they cannot be trained.

        Call it after full weights were loaded. FP8 weights with scales `[H, N, 1]` are loaded
        afterwards, by `load_state_dict`.
        """
        if not self.fp8:
            raise ConfigError("freeze() needs FP8 experts; create them with quantised='fp8'")
        if not self.frozen:
            self._quantise_weights()
            for name, tensor in (self._own_tensors() | self._codes).items():
                fixed = nn.Parameter(tensor.detach(), requires_grad=False)
                self.register_parameter(name, fixed)
            self._codes = {}
        return self

    @property
    def frozen(self) -> bool:
        """Whether the experts hold FP8 weights only."""
        return self.gate_up_scales is not None

    @property
    def bundle(self) -> dict[str, torch.Tensor]:
        """The tensors of a replica; reading it quantises trained FP8 weights."""
        if not self.fp8:
            return self._own_tensors()
        if not self.frozen:
            self._quantise_weights()
        return self._own_tensors() | self._fp8_tensors()

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        """Return weights and biases."""
        tensors = {}
        for name in (*SCALES, *BIASES):
            tensor = getattr(self, name)
            if tensor is not None:
                tensors[name] = tensor
        return tensors

    def _fp8_tensors(self) -> dict[str, torch.Tensor]:
        """Return FP8 codes and scales, if there are any."""
        if not self.frozen:
            return dict(self._codes)
        return {name: getattr(self, name).detach() for name in QUANTISED}

    @outside_dispatch_modes
    @torch.no_grad()
    def _quantise_weights(self) -> None:
        """Quantise the weights into memory that stays, since backward and graphs use it again."""
        for name, scales in SCALES.items():
            weight, codes = getattr(self, name).detach(), self._codes.get(name)
            if codes is None or (codes.shape, codes.device) != (weight.shape, weight.device):
                with torch.inference_mode(False):
                    self._codes[name] = weight.new_empty(weight.shape, dtype=E4M3)
                    self._codes[scales] = weight.new_empty(
                        *weight.shape[:2], 1, dtype=torch.float32
                    )
            _quantise_on(weight.device)(weight, self._codes[name], self._codes[scales])

    @property
    def pack(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function that packs rows to bytes before sending; None: rows travel unpacked."""
        return _packed if self.fp8 else None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> HomeModule:
        """Move the parameters; frozen FP8 codes and scales keep their dtypes."""
        kept = [getattr(self, name) for name in QUANTISED] if self.frozen else []

        def apply(tensor: torch.Tensor) -> Any:
            if not any(tensor is stack for stack in kept):
                return fn(tensor)
            return fn(tensor.view(torch.uint8)).view(tensor.dtype)

        return super()._apply(apply, recurse)

    def check(self, rows: torch.Tensor) -> None:
        """Raise if the rows have the wrong width, before anything is sent."""
        width = self.gate_up_proj.shape[2]
        if rows.shape[-1] != width:
            raise LoadError(f"tokens must be [..., {width}], got {list(rows.shape)}")

    def weights(self) -> list[torch.Tensor]:
        """Return weights and biases, which gradients flow to."""
        return list(self._own_tensors().values())

    def forward(
        self, arrivals: Arrivals, replicas: Replicas, weights: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return `[A, D]` outputs times gates. Call inside the `with` block of the replicas.

        weights: tensors in place of `weights()`.
        """
        own = self._own_tensors()
        if weights is not None:
            own = dict(zip(own, weights, strict=True))
        engine = self._engine(arrivals, replicas)
        call = _Call(engine, replicas, tuple(own), self._fp8_tensors() if self.fp8 else {})
        inputs = arrivals.rows, arrivals.gates, arrivals.packed
        outputs: torch.Tensor = run(_TwoProducts, *inputs, call, *own.values())
        return outputs

    def _engine(self, arrivals: Arrivals, replicas: Replicas) -> TorchProducts | TritonProducts:
        """Return the products engine for these rows."""
        engine, rows = self.engine, arrivals.rows
        if engine is None:
            small = rows.dtype.itemsize <= 4  # the kernels do not support float64
            engine = "triton" if replicas.kernels and small else "torch"
        if engine == "torch":
            fp8 = rows.dtype if self.fp8 else None
            return TorchProducts(arrivals.begins(), self.activation, bitwise=self.bitwise, fp8=fp8)
        from ultraep.backends.triton.products import TritonProducts

        return TritonProducts(arrivals.offsets, self.activation, rows.dtype, fp8=self.fp8)


def _quantise_on(device: torch.device) -> Quantise:
    """Return the function that quantises on a device: a Triton kernel, or plain torch."""
    if not has_kernels(device.type):
        return quantise
    from ultraep.backends.triton import fp8

    return fp8.quantise


def _packed(rows: torch.Tensor) -> torch.Tensor:
    return pack(rows, _quantise_on(rows.device))


@dataclass
class _Call:
    """The weights and the engine for the rows of one microbatch."""

    products: TorchProducts | TritonProducts
    replicas: Replicas
    names: tuple[str, ...]  # of the trained weights
    quantised: dict[str, torch.Tensor]  # multiplied instead

    def homes(self, trained: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights that home rows are multiplied by."""
        return dict(zip(self.names, trained, strict=True)) | self.quantised


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
        slots, inputs = call.replicas.tensors(), rows_AD if packed is None else packed
        if packed is None and call.quantised:
            inputs = _packed(rows_AD)
        up = products.multiply(inputs, *_layer(homes, slots, "gate_up"))
        outputs_AD = products.multiply(
            products.activate(up),
            *_layer(homes, slots, "down"),
            scale=gates_A,
            out=call.replicas.served_rows(rows_AD),
        )
        if ctx is not UNTRACKED:
            ctx.like = rows_AD.new_empty(()).expand(rows_AD.shape)
            save(ctx, call, inputs, gates_A, up, *stacked)
        return outputs_AD

    @staticmethod
    @first_order
    def backward(
        ctx: Any, call: _Call, gradients: Gradients, saved: tuple[torch.Tensor, ...]
    ) -> Gradients:
        (d_outputs_AD,), (inputs, gates_A, up, *stacked) = gradients, saved
        assert d_outputs_AD is not None
        products, homes = call.products, call.homes(stacked)
        trained = dict(zip(call.names, stacked, strict=True))
        learns = any(ctx.needs_input_grad[4:])
        sums = _Gradients(call.replicas, trained, products.knows_spans) if learns else None
        with call.replicas as replicas:
            slots = replicas.tensors()
            gate_up, (down, down_bias) = (_layer(homes, slots, n) for n in ("gate_up", "down"))
            d_hidden = products.multiply_transposed(d_outputs_AD, down)
            d_up, hidden, d_gates_A = products.activate_backward(up, d_hidden, gates_A)
            if down_bias is not None and ctx.needs_input_grad[1]:
                products.row_dots(d_outputs_AD, down_bias, d_gates_A)
            if sums is not None:
                products.weight_gradients(d_outputs_AD, hidden, *sums.of("down"), scale=gates_A)
                products.weight_gradients(d_up, inputs, *sums.of("gate_up"))
            beside = None if sums is None else sums.reduce()
            d_rows_AD = products.multiply_transposed(
                d_up, gate_up[0], out=replicas.served_rows(ctx.like), beside=beside
            )
            d_stacked = sums.reduced() if sums is not None else [None] * len(stacked)
        return d_rows_AD, d_gates_A if ctx.needs_input_grad[1] else None, None, None, *d_stacked


def _layer(
    homes: Weights,
    slots: Weights,
    layer: str,
    sums: Weights | None = None,
    spans: torch.Tensor | None = None,
) -> tuple[Stacks, Stacks | None]:
    """Return weights and biases of one layer of all slots, or their gradients."""

    def stacks(name: str, scales: Stacks | None = None) -> Stacks:
        own = sums[name] if sums else None
        return Stacks(homes[name].detach(), slots[name], own, spans, scales)

    weights, scales, bias = (f"{layer}_proj", f"{layer}_scales", f"{layer}_bias")
    weight_stacks = stacks(weights, stacks(scales) if scales in homes else None)
    return weight_stacks, stacks(bias) if bias in homes else None


class _Gradients:
    """Weight gradients of all slots, in the dtype of the reduction until it has finished.

    If the engine supports spans, gradients of home experts without replicas are rounded at once.
    """

    def __init__(self, replicas: Replicas, homes: Weights, knows_spans: bool) -> None:
        self._replicas, self._homes = replicas, homes
        wide = {n: accumulator(w.dtype) for n, w in homes.items()}
        if replicas.possible:
            self._slots = replicas.gradient_slots(
                {n: (tuple(w.shape[1:]), wide[n]) for n, w in homes.items()}
            )
        else:  # empty, so that no memory is cleared
            self._slots = {n: w.new_empty(0, *w.shape[1:]) for n, w in homes.items()}
        narrower = any(w.dtype != wide[n] for n, w in homes.items())
        apart = replicas.possible and knows_spans and narrower
        self._spans = replicas.spans() if apart else None
        self._own = {n: torch.empty_like(w, dtype=wide[n]) for n, w in homes.items() if apart}
        self._of_homes = {
            n: torch.empty_like(w, dtype=wide[n] if replicas.possible and not apart else w.dtype)
            for n, w in homes.items()
        }

    def of(self, layer: str) -> tuple[Stacks, Stacks | None]:
        """Return the memory for the gradients of one layer."""
        return _layer(self._of_homes, self._slots, layer, self._own, self._spans)

    def reduce(self) -> Beside | None:
        """Start to add the gradients of replicas to the home gradients."""
        if not self._replicas.possible:
            return None
        return self._replicas.reduce(self._of_homes, self._own or None, beside=True)

    def reduced(self) -> list[torch.Tensor]:
        """Wait for `reduce` and return the gradients of the home experts."""
        self._replicas.reduced()
        return [self._of_homes[name].to(weight.dtype) for name, weight in self._homes.items()]


@torch.no_grad()
def draw(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a weight `[out, in]` uniformly within 1 / sqrt(in), equally for all dtypes."""
    drawn = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
    weight.copy_((2 * drawn - 1) / math.sqrt(weight.shape[-1]))
