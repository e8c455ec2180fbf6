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
from collections.abc import Callable
from types import ModuleType
from typing import Any, Self

import torch
from torch import nn

import ultraep.formats as formats
from ultraep.activations import activation_named
from ultraep.backends import backend_for
from ultraep.bundle import Bundle, Layout, given_tensors, resolve
from ultraep.dispatch import Arrivals
from ultraep.errors import ConfigError, LoadError
from ultraep.formats import format_named
from ultraep.loan import Network, run, serve
from ultraep.parallel.home import HomeModule
from ultraep.plane import Copies
from ultraep.products import TorchProducts
from ultraep.quantised import WEIGHTS, QuantisedProducts, QuantisedWeights, check_quantised
from ultraep.two_products import Call, Engine, TwoProducts, Weights

NAMES = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
ENGINES = ("torch", "triton")


class Experts(HomeModule):
    """The home experts of one rank, stacked: two products with an activation between them.

    home_experts: which they are.   activation: see `ultraep.activations.ACTIVATIONS`.
    seed: experts are drawn from it one by one, so a model starts alike on any number of ranks.
    bitwise: what a row gives does not depend on the rows beside it; somewhat slower on a CPU.
    engine: of the products, "torch" or "triton"; None: what is fastest where the rows are.
    quantised: a name of `ultraep.formats.FORMATS`. Forward then multiplies numbers of eight bits,
        copies consist of them, and so do rows that travel; full weights stay home, and learn.
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
        self.form = None if quantised is None else format_named(quantised)
        self._made = None if self.form is None else QuantisedWeights(self.form)

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
        check_quantised(format_named(quantised), tensors, len(home_experts))
        experts = cls.__new__(cls)
        HomeModule.__init__(experts)
        experts._set(home_experts, activation, bitwise, engine, quantised)
        experts._made = None
        for name in (*WEIGHTS, *WEIGHTS.values(), "gate_up_bias", "down_bias"):
            given = tensors.get(name)
            held = None if given is None else nn.Parameter(given.detach(), requires_grad=False)
            experts.register_parameter(name, held)
        return experts

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> HomeModule:
        """As any module, but numbers of eight bits and their scales keep their types."""
        if self.form is None or self._made is not None:
            return super()._apply(fn, recurse)
        kept = [getattr(self, name) for name in (*WEIGHTS, *WEIGHTS.values())]

        def apply(tensor: torch.Tensor) -> Any:
            if not any(tensor is one for one in kept):
                return fn(tensor)
            return fn(tensor.view(torch.uint8)).view(tensor.dtype)

        return super()._apply(apply, recurse)

    def _draw(self, seed: int) -> None:
        for index, expert in enumerate(self.home_experts):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + expert)
            for stack in (self.gate_up_proj, self.down_proj):
                draw(stack[index], generator)

    @property
    def bundle(self) -> dict[str, torch.Tensor]:
        """What a copy of an expert consists of."""
        return self.bundle_now(None)

    def bundle_now(self, promise: int | None) -> dict[str, torch.Tensor]:
        """That of the weights as they are now.   promise: see `Balancer.weights_promise`."""
        own = dict(self.named_parameters())
        if self._made is not None:
            full = {name: own[name] for name in WEIGHTS}
            self._made.refresh(full, _numbers(self.gate_up_proj.device), promise)
        return own | self._eight_bits()

    def _eight_bits(self) -> dict[str, torch.Tensor]:
        """Numbers and scales, if weights are quantised."""
        if self._made is not None:
            return self._made.tensors()
        names = () if self.form is None else (*WEIGHTS, *WEIGHTS.values())
        return {name: getattr(self, name).detach() for name in names}

    @property
    def pack(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What makes rows of bytes of those that travel; None: they travel as they are."""
        form = self.form
        if form is None or not form.packs:
            return None
        return lambda rows: _numbers(rows.device).pack(form, rows)

    def check(self, rows: torch.Tensor) -> None:
        """Refuse rows that do not fit, before anything is sent."""
        width = self.gate_up_proj.shape[2]
        if rows.shape[-1] != width:
            raise LoadError(f"tokens must be [..., {width}], got {list(rows.shape)}")

    def forward(self, arrivals: Arrivals, copies: Copies) -> torch.Tensor:
        """[A, D] outputs times their gates, inside of the `with` block of the copies."""
        learned = {n: weight for n in NAMES if (weight := getattr(self, n)) is not None}
        call = Call(self._products(arrivals, copies), copies, tuple(learned), self._eight_bits())
        outputs: torch.Tensor = TwoProducts.apply(  # type: ignore[no-untyped-call]
            arrivals.rows, arrivals.gates, arrivals.packed, call, *learned.values()
        )
        return outputs

    def _products(self, arrivals: Arrivals, copies: Copies) -> Engine:
        """The engine for these rows."""
        engine, rows, form = self.engine, arrivals.rows, self.form
        if engine is None:
            small = rows.dtype.itemsize <= 4  # kernels know no double precision
            engine = "triton" if copies.kernels and small else "torch"
        if engine == "torch":
            plain = TorchProducts(arrivals.begins(), self.activation, bitwise=self.bitwise)
            return plain if form is None else QuantisedProducts(plain, form, rows.dtype)
        if form is not None:
            from ultraep.backends.triton.quantised import TritonQuantised

            return TritonQuantised(arrivals.offsets, self.activation, rows.dtype, form, copies.sms)
        from ultraep.backends.triton.products import TritonProducts

        return TritonProducts(arrivals.offsets, self.activation, rows.dtype, copies.sms)


def _numbers(device: torch.device) -> ModuleType:
    """Who quantises there: the kernels of a GPU, if they are installed, or their twins."""
    if device.type == "cpu" or backend_for(device.type).name != "triton":
        return formats
    from ultraep.backends.triton import quantise

    return quantise


class ExpertsFrom(HomeModule):
    """Experts that are any network of any framework, with the tensors that it has.

    network: `network(rows, counts, tensors)`, see `loan.serve`.
    tensors: a bundle, for the home experts of this rank; parameters of modules stay theirs, and
        are trained and saved there.
    home_experts: which they are.
    """

    def __init__(self, network: Network, tensors: Bundle, home_experts: list[int]) -> None:
        super().__init__()
        self.home_experts = tuple(home_experts)
        self._network, self._tensors = network, dict(tensors)
        self._tried: set[Any] = set()

    def home_parameters(self) -> list[nn.Parameter]:
        """Those among the tensors that are given as such."""
        return [t for t in given_tensors(self._tensors) if isinstance(t, nn.Parameter)]

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

    def bundle_now(self, promise: int | None) -> Bundle:
        """What a copy consists of, whatever is promised of the weights."""
        del promise
        return self._tensors

    @torch.no_grad()
    def check(self, rows: torch.Tensor) -> None:
        """Refuse a network that does not return rows like those it gets, before anything is sent.

        It is tried on one row, once for every kind of rows, where there are home experts.
        """
        kind = (rows.shape[-1], rows.dtype, rows.device)
        if self.home_experts and kind not in self._tried:
            row, tensors = rows.new_zeros(1, rows.shape[-1]), resolve(self.bundle)
            Layout.of(tensors, len(self.home_experts))
            run(self._network, row, [1] + [0] * (len(self.home_experts) - 1), tensors)
        self._tried.add(kind)

    def forward(self, arrivals: Arrivals, copies: Copies) -> torch.Tensor:
        """[A, D] outputs times their gates, inside of the `with` block of the copies."""
        return serve(self._network, arrivals, copies, self._tensors)


@torch.no_grad()
def draw(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a weight `[out, in]` evenly within 1 / sqrt(in), alike for every type and device."""
    drawn = torch.rand(weight.shape, generator=generator, dtype=torch.float64)
    weight.copy_((2 * drawn - 1) / math.sqrt(weight.shape[-1]))
