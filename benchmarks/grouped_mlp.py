"""The experts of one rank by themselves: all that stage 6 launches, forward and backward.

Shapes: A rows that there is room for, L slots, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from timing import Call, Clock

if TYPE_CHECKING:  # kernels are imported late: Triton reads its settings when they are
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
    """The experts of one rank, with room for so many rows, and all that both passes need.

    `sms`: multiprocessors to fill; all of them, if not given.
    """

    def __init__(
        self,
        model: Model,
        slots: int,
        room: int,
        clock: Clock,
        *,
        sms: int | None = None,
        seed: int = 0,
    ) -> None:
        width, ffn, drawn = model.width, model.ffn, drawer(clock, seed)

        def empty(*shape: int, dtype: torch.dtype = clock.dtype) -> torch.Tensor:
            return torch.empty(shape, device=clock.device, dtype=dtype)

        self._slots, self._sms = slots, sms
        self._offsets = torch.zeros(slots + 1, dtype=torch.int32, device=clock.device)
        self._gate_up = as_stacks(drawn(slots, 2 * ffn, width).mul_(width**-0.5))
        self._down = as_stacks(drawn(slots, width, ffn).mul_(ffn**-0.5))
        self._d_gate_up = as_stacks(empty(slots, 2 * ffn, width, dtype=torch.float32))
        self._d_down = as_stacks(empty(slots, width, ffn, dtype=torch.float32))
        self._rows_AD, self._d_out_AD = drawn(room, width), drawn(room, width)
        self._served_AD = empty(room, width)  # outputs, then gradients of the rows
        self._up, self._d_up = empty(room, 2 * ffn), empty(room, 2 * ffn)
        self._hidden_AF = empty(room, ffn)
        self._scale_A = drawn(room).float()
        self._d_scale_A = empty(room, dtype=torch.float32)

    def divide(self, rows: Sequence[int]) -> None:
        """From now on, the slots have so many rows."""
        assert len(rows) == self._slots, rows
        assert sum(rows) <= len(self._rows_AD), rows
        self._offsets.copy_(torch.tensor([0, *accumulate(rows)], dtype=torch.int32))

    def forward(self) -> None:
        """Both products and SwiGLU."""
        from ultraep.backends.triton.grouped import Grouped

        grouped = Grouped(self._offsets, programs=self._sms)
        grouped.multiply(self._rows_AD, self._gate_up, self._up)
        grouped.swiglu(self._up, self._hidden_AF)
        grouped.multiply(self._hidden_AF, self._down, self._served_AD, scale=self._scale_A)

    def backward(self) -> None:
        """Of the last forward pass with these rows."""
        from ultraep.backends.triton.grouped import Grouped

        grouped = Grouped(self._offsets, programs=self._sms)
        hidden_AF, scale_A = self._hidden_AF, self._scale_A
        grouped.multiply_transposed(self._d_out_AD, self._down, hidden_AF)
        grouped.swiglu_backward(
            self._up,
            hidden_AF,
            self._d_up,
            hidden=hidden_AF,
            scale=scale_A,
            d_scale=self._d_scale_A,
        )
        grouped.weight_gradients(self._d_out_AD, hidden_AF, self._d_down, scale=scale_A)
        grouped.weight_gradients(self._d_up, self._rows_AD, self._d_gate_up)
        grouped.multiply_transposed(self._d_up, self._gate_up, self._served_AD)

    @property
    def passes(self) -> dict[str, Call]:
        return {"forward": self.forward, "backward": self.backward}


def drawer(clock: Clock, seed: int = 0) -> Draw:
    generator = torch.Generator(device=clock.device).manual_seed(seed)
    return lambda *shape: torch.randn(
        shape, generator=generator, device=clock.device, dtype=clock.dtype
    )


def as_stacks(tensor: torch.Tensor) -> Stacks:
    """The last slot is a spare one."""
    from ultraep.ops.products import Stacks

    return Stacks(tensor[:-1], tensor[-1:])
