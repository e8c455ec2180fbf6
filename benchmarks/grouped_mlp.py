"""The experts of one rank by themselves: all that stage 6 launches, forward and backward.

Shapes: A rows of capacity, L slots, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from timing import Call, Clock

if TYPE_CHECKING:  # kernels are imported late: Triton reads its settings when they are
    from ultraep.backends.triton.products import TritonProducts
    from ultraep.ops.products import Stacks

Draw = Callable[..., torch.Tensor]  # of a shape


@dataclass(frozen=True, slots=True)
class Model:
    """Widths of an expert: gate and up [2F, D], down [D, F]."""

    name: str
    width: int
    ffn: int

    def flops(self, rows: int) -> int:
        """Of a forward pass."""
        return 2 * 3 * self.width * self.ffn * rows


QWEN3 = Model("qwen3", 4096, 1536)
DEEPSEEK = Model("deepseek", 7168, 2048)
GLM = Model("glm", 5120, 1536)
GPT_OSS = Model("gpt-oss", 2880, 2880)
TINY = Model("tiny", 64, 32)


class Mlp:
    """The experts of one rank, and all tensors of both passes; capacity: rows of all slots."""

    def __init__(self, model: Model, slots: int, capacity: int, clock: Clock) -> None:
        width, ffn, drawn = model.width, model.ffn, drawer(clock)

        def empty(*shape: int, dtype: torch.dtype = clock.dtype) -> torch.Tensor:
            return torch.empty(shape, device=clock.device, dtype=dtype)

        self._slots = slots
        self._offsets = torch.zeros(slots + 1, dtype=torch.int32, device=clock.device)
        self._gate_up = as_stacks(drawn(slots, 2 * ffn, width).mul_(width**-0.5))
        self._down = as_stacks(drawn(slots, width, ffn).mul_(ffn**-0.5))
        self._d_gate_up = as_stacks(empty(slots, 2 * ffn, width, dtype=torch.float32))
        self._d_down = as_stacks(empty(slots, width, ffn, dtype=torch.float32))
        self._rows_AD, self._d_out_AD = drawn(capacity, width), drawn(capacity, width)
        self._served_AD = empty(capacity, width)  # outputs, then gradients of the rows
        self._up = empty(capacity, 2 * ffn)
        self._hidden_AF = empty(capacity, ffn)
        self._scale_A = drawn(capacity).float()

    def divide(self, rows: Sequence[int]) -> None:
        """Set the rows of every slot."""
        assert len(rows) == self._slots, rows
        assert sum(rows) <= len(self._rows_AD), rows
        self._offsets.copy_(torch.tensor([0, *accumulate(rows)], dtype=torch.int32))

    def forward(self) -> None:
        """Both products and SwiGLU."""
        products = self._products()
        up = products.multiply(self._rows_AD, self._gate_up, None, out=self._up)
        hidden_AF = products.activate(up)
        products.multiply(hidden_AF, self._down, None, scale=self._scale_A, out=self._served_AD)

    def backward(self) -> None:
        """Backward of the last forward pass with these rows."""
        products, scale_A = self._products(), self._scale_A
        d_hidden_AF = products.multiply_transposed(self._d_out_AD, self._down, out=self._hidden_AF)
        d_up, hidden_AF, _ = products.activate_backward(self._up, d_hidden_AF, scale_A)
        products.weight_gradients(self._d_out_AD, hidden_AF, self._d_down, None, scale=scale_A)
        products.weight_gradients(d_up, self._rows_AD, self._d_gate_up, None)
        products.multiply_transposed(d_up, self._gate_up, out=self._served_AD)

    def _products(self) -> TritonProducts:
        from ultraep.backends.triton.products import TritonProducts
        from ultraep.ops.products import activation_named

        dtype = self._rows_AD.dtype
        return TritonProducts(self._offsets, activation_named("swiglu"), dtype)

    @property
    def passes(self) -> dict[str, Call]:
        return {"forward": self.forward, "backward": self.backward}


def drawer(clock: Clock) -> Draw:
    generator = torch.Generator(device=clock.device).manual_seed(0)
    return lambda *shape: torch.randn(
        shape, generator=generator, device=clock.device, dtype=clock.dtype
    )


def as_stacks(tensor: torch.Tensor) -> Stacks:
    """The last slot is a spare one."""
    from ultraep.ops.products import Stacks

    return Stacks(tensor[:-1], tensor[-1:])
