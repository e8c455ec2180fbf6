"""FP8 experts compared with bfloat16 in the same run: products, stage 6, a layer, and bytes.

    python benchmarks/bench_fp8.py                  # needs a GPU; a minute
    python benchmarks/bench_fp8.py --only products
    python benchmarks/bench_fp8.py --toy            # tiny, for CI; also without a GPU

The formats alternate; times are medians over rounds. Errors are relative norms in float64:
`rounding` against the product of the quantised numbers, `error` against the product of the
unquantised weights and rows. `any scales` are scales that are not powers of two, as in many
checkpoints.

Shapes: A rows, L slots, D model width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from grouped_mlp import DEEPSEEK, QWEN3, TINY, Draw, Model, as_stacks, drawer
from harness import KERNELS, Bench, Case, Line, Metric, Values, main
from layers import FixedRouter, distance, layer_with_weights
from timing import Call, alternating_ms, captured, free
from torch import nn
from torch.nn.functional import pad, silu

import ultraep
from ultraep.bundle import Layout
from ultraep.ops.formats import E4M3, FORMATS, Format

LARGEST = 448.0  # of e4m3
SAMPLE = 128  # rows per slot that are checked for errors
PLAIN, TORCH, TORCH_ROWS = "bf16", "torch, bf16", "torch, fp8_rows"
PROMISED = "forward, weights promised"
ANY_SCALES = "any scales"

TIME = Metric("time_p50", "ms", "ms", ".3f")
RATE = Metric("rate", "TFLOP/s", "TFLOP/s", ".0f")
SPEED = Metric("speed_over_bf16", "ratio", "over bf16", ".2f")
ROUNDING = Metric("error_of_product", "ratio", "rounding", ".5f")
ERROR = Metric("error", "ratio", "error", ".4f")
BYTES = Metric("size_of_a_copy", "MB", "MB", ".3f")
SHARE = Metric("bytes_over_bf16", "ratio", "of bf16", ".4f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Models with slots, rows per slot, rounds, and calls per round."""

    models: tuple[tuple[Model, int], ...]
    rows: tuple[int, ...]
    top_k: int
    rounds: int
    calls: int


MODELS = ((QWEN3, 16), (DEEPSEEK, 16))
FULL = Scale(models=MODELS, rows=(512, 1024, 4096), top_k=8, rounds=7, calls=3)
QUICK = Scale(models=MODELS[:1], rows=(4096,), top_k=8, rounds=5, calls=3)
TOY = Scale(models=((TINY, 4),), rows=(8,), top_k=2, rounds=1, calls=1)


class Quantised:
    """One weight per slot in one format, and its input rows."""

    def __init__(
        self, form: Format, weights: torch.Tensor, rows: torch.Tensor, any_scales: bool = False
    ) -> None:
        from ultraep.backends.triton import quantise
        from ultraep.ops.quantised import QuantisedStacks

        self.form, self._verbs = form, quantise
        self.data = torch.empty_like(weights, dtype=E4M3)
        shape = form.scale_shape(tuple(weights.shape))
        self.scales = weights.new_empty(shape, dtype=form.scale_type)
        quantise.quantise(form, weights, self.data, self.scales)
        if any_scales:
            take_any_scales(form, weights, self.data, self.scales)
        self.stacks = QuantisedStacks(as_stacks(self.data), as_stacks(self.scales))
        self.rows, self._width = rows, rows.shape[1]
        self.given = quantise.pack(form, rows) if form.packs else rows

    def exact(self, slot: int, part: slice) -> torch.Tensor:
        """The exact product of the quantised numbers."""
        data, scales = self.data[slot : slot + 1], self.scales[slot : slot + 1]
        weight = self._verbs.dequantise(self.form, data, scales, torch.float32)[0]
        rows = self.rows[part]
        if self.form.packs:
            rows = self._verbs.unpack(self.form, self.given[part], self._width, torch.float32)
        return rows.double() @ weight.double().T


def take_any_scales(
    form: Format, weights: torch.Tensor, data: torch.Tensor, scales: torch.Tensor
) -> None:
    """Quantise weights as many checkpoints do: the maximum of every block becomes 448."""
    rows, columns = weights.shape[1:]
    padded = pad(weights, (0, -columns % form.width, 0, -rows % form.height))
    blocks = padded.unflatten(2, (-1, form.width)).unflatten(1, (-1, form.height))
    scales.copy_(blocks.abs().amax(dim=(2, 4)).float() / LARGEST)
    spread = scales.repeat_interleave(form.height, dim=1)[:, :rows]
    spread = spread.repeat_interleave(form.width, dim=2)[..., :columns]
    data.copy_((weights / spread).clamp(-LARGEST, LARGEST))


def measured(bench: Bench, calls: Mapping[str, Call]) -> dict[str, float]:
    """Median milliseconds per call of each variant; the variants alternate."""
    for call in calls.values():
        call()
    return alternating_ms(bench.clock, calls, bench.scale.rounds, bench.scale.calls)


def values_of(ms: float, plain: float, flops: int) -> Values:
    return {TIME: ms, RATE: flops / ms / 1e9, SPEED: plain / ms}


def engines(offsets: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Our engines by format, and the engine of plain products."""
    from ultraep.backends.triton.products import TritonProducts
    from ultraep.backends.triton.quantised import TritonQuantised
    from ultraep.ops.activations import activation_named

    swiglu = activation_named("swiglu")
    plain: dict[str, Any] = {PLAIN: TritonProducts(offsets, swiglu, dtype)}
    ours = {n: TritonQuantised(offsets, swiglu, dtype, form) for n, form in FORMATS.items()}
    return plain | ours


def offsets_of(bench: Bench, slots: int, rows: int) -> torch.Tensor:
    return torch.arange(0, (slots + 1) * rows, rows, dtype=torch.int32, device=bench.clock.device)


def products(bench: Bench) -> None:
    """Time grouped products: gate and up, then down."""
    for model, slots in bench.scale.models:
        for rows in bench.scale.rows:
            shapes = {"gate_up": (2 * model.ffn, model.width), "down": (model.width, model.ffn)}
            lines = []
            for work, shape in shapes.items():
                case = {"model": model.name, "slots": slots, "rows": rows, "work": work}
                lines += product_lines(bench, case, slots, rows, *shape)
                free()
            bench.table(f"D {model.width}, F {model.ffn}", lines)


def product_lines(
    bench: Bench, case: Case, slots: int, rows: int, height: int, width: int
) -> list[Line]:
    draw, offsets = drawer(bench.clock), offsets_of(bench, slots, rows)
    given = draw(slots * rows, width)
    weights = draw(slots, height, width).mul_(width**-0.5)
    held = {name: Quantised(form, weights, given) for name, form in FORMATS.items()}
    held[f"fp8, {ANY_SCALES}"] = Quantised(FORMATS["fp8"], weights, given, any_scales=True)
    ours = engines(offsets, given.dtype)
    out = given.new_empty(slots * rows, height)
    calls: dict[str, Call] = {
        PLAIN: partial(ours[PLAIN].multiply, given, as_stacks(weights), None, out=out)
    }
    for name, of in held.items():
        calls[name] = partial(ours[of.form.name].multiply, of.given, of.stacks, None, out=out)
    if bench.on_gpu:
        calls |= torch_calls(given, weights, held["fp8_rows"], offsets[1:])
    errors = {
        name: errors_of(call, given, weights, held.get(name.removeprefix("torch, ")), rows)
        for name, call in calls.items()
    }
    times = measured(bench, calls)
    flops = 2 * slots * rows * height * width
    return [
        Line({**case, "path": n}, {**values_of(ms, times[PLAIN], flops), **errors[n]})
        for n, ms in times.items()
    ]


def torch_calls(
    rows: torch.Tensor, weights: torch.Tensor, by_rows: Quantised, ends: torch.Tensor
) -> dict[str, Call]:
    """Grouped products of torch: bfloat16, and e4m3 with one scale per row."""
    codes, scales = by_rows.form.parts(by_rows.given, rows.shape[1])
    codes, scales = codes.contiguous(), scales.flatten().contiguous()
    of_weights = by_rows.scales.squeeze(-1).contiguous()
    return {
        TORCH: lambda: torch._grouped_mm(rows, weights.mT, offs=ends),
        TORCH_ROWS: lambda: torch._scaled_grouped_mm(
            codes,
            by_rows.data.mT,
            scales,
            of_weights,
            offs=ends,
            out_dtype=rows.dtype,
            use_fast_accum=True,
        ),
    }


def errors_of(
    call: Callable[[], Any],
    given: torch.Tensor,
    weights: torch.Tensor,
    held: Quantised | None,
    rows: int,
) -> Values:
    """Errors of some rows of the first and the last slot."""
    outputs = call()
    rounding, error = [], []
    for slot in (0, len(weights) - 1):
        part = slice(slot * rows, slot * rows + min(rows, SAMPLE))
        full = given[part].double() @ weights[slot].double().T
        exact = full if held is None else held.exact(slot, part)
        rounding.append(distance(outputs[part], exact))
        error.append(distance(outputs[part], full))
    return {ROUNDING: max(rounding), ERROR: max(error)}


def experts(bench: Bench) -> None:
    """Time stage 6 forward: both products and the activation, on rows as they arrive."""
    for model, slots in bench.scale.models:
        lines = []
        for rows in bench.scale.rows:
            lines += expert_lines(bench, model, slots, rows)
            free()
        bench.table(f"D {model.width}, F {model.ffn}", lines)


def expert_lines(bench: Bench, model: Model, slots: int, rows: int) -> list[Line]:
    draw = drawer(bench.clock)
    given = draw(slots * rows, model.width)
    gates = torch.rand_like(given[:, 0].float())
    up, down = weights_of(draw, model, slots)
    ours = engines(offsets_of(bench, slots, rows), given.dtype)
    out = torch.empty_like(given)

    def forward(engine: Any, first: torch.Tensor, gate_up: Any, second: Any) -> torch.Tensor:
        hidden = engine.activate(engine.multiply(first, gate_up, None))
        result: torch.Tensor = engine.multiply(hidden, second, None, scale=gates, out=out)
        return result

    calls: dict[str, Callable[[], torch.Tensor]] = {
        PLAIN: partial(forward, ours[PLAIN], given, as_stacks(up), as_stacks(down))
    }
    for name, form in FORMATS.items():
        first, second = Quantised(form, up, given), Quantised(form, down, given[:1, : model.ffn])
        stacks = first.stacks, second.stacks
        calls[name] = partial(forward, ours[name], first.given, *stacks)
        if form.packs and form.width:
            others = [Quantised(form, w, given[:1, : w.shape[2]], True) for w in (up, down)]
            stacks = others[0].stacks, others[1].stacks
            calls[f"{name}, {ANY_SCALES}"] = partial(forward, ours[name], first.given, *stacks)
    last = slice((slots - 1) * rows, (slots - 1) * rows + SAMPLE)  # rows of the last slot
    gate, value = (given[last].double() @ up[-1].double().T).chunk(2, dim=1)
    wanted = (silu(gate) * value) @ down[-1].double().T * gates[last, None].double()
    errors = {name: distance(call()[last], wanted) for name, call in calls.items()}
    times = measured(bench, calls)
    case: Case = {"model": model.name, "slots": slots, "rows": rows}
    flops = model.flops(slots * rows)
    return [
        Line({**case, "path": n}, {**values_of(ms, times[PLAIN], flops), ERROR: errors[n]})
        for n, ms in times.items()
    ]


def weights_of(draw: Draw, model: Model, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    up = draw(slots, 2 * model.ffn, model.width).mul_(model.width**-0.5)
    return up, draw(slots, model.width, model.ffn).mul_(model.ffn**-0.5)


def layer(bench: Bench) -> None:
    """Time a whole layer of one rank: forward without gradients, and a training step."""
    for model, slots in bench.scale.models:
        rows, top_k = max(bench.scale.rows), bench.scale.top_k
        tokens = slots * rows // top_k
        lines = layer_lines(bench, model, slots, tokens, top_k)
        bench.table(f"EP1, {tokens} tokens, top {top_k}; D {model.width}, F {model.ffn}", lines)
        free()


def layer_lines(bench: Bench, model: Model, slots: int, tokens: int, top_k: int) -> list[Line]:
    draw, device = drawer(bench.clock), bench.clock.device
    x, dy = draw(tokens, model.width), draw(tokens, model.width)
    scores = torch.rand(tokens, slots, device=device)
    best, ids = scores.topk(top_k, dim=1)
    weights = dict(zip(("gate_up_proj", "down_proj"), weights_of(draw, model, slots), strict=True))
    moes = {}
    for name in (PLAIN, *FORMATS):
        balancer = ultraep.Balancer(
            "alone", experts=slots, data_plane="mapped" if x.is_cuda else "messages"
        )
        router = FixedRouter(ids, best / best.sum(dim=1, keepdim=True))
        moes[name] = layer_with_weights(balancer, router, weights, None if name == PLAIN else name)
    leaf = x.clone().requires_grad_()

    def forward(moe: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            y: torch.Tensor = moe(x)
        return y

    def step(moe: nn.Module) -> None:
        leaf.grad = None
        for parameter in moe.parameters():
            parameter.grad = None
        moe(leaf).backward(dy)

    wanted, flops = forward(moes[PLAIN]).clone(), model.flops(tokens * top_k)
    errors = {name: distance(forward(moe), wanted) for name, moe in moes.items()}
    works = [(PROMISED, forward, False), ("forward", forward, False)]
    if bench.on_gpu:
        works += [(f"{work}, in a graph", call, True) for work, call, _ in works]
    lines = []
    for work, call, in_graph in (*works, ("forward, backward", step, False)):
        with ExitStack() as promises:
            for moe in moes.values() if work.startswith(PROMISED) else ():
                promises.enter_context(moe.balancer.unchanged_weights())
            calls: dict[str, Call] = {name: partial(call, moe) for name, moe in moes.items()}
            if in_graph:
                calls = {name: captured(call, 1)[0].replay for name, call in calls.items()}
            times = measured(bench, calls)
        for name, ms in times.items():
            case = {"model": model.name, "work": work, "path": name}
            speeds = values_of(ms, times[PLAIN], flops * (3 if call is step else 1))
            lines.append(Line(case, {**speeds, ERROR: errors[name] if call is forward else None}))
    return lines


def copies(bench: Bench) -> None:
    """Bytes of a replica in every format."""
    for model, slots in bench.scale.models:
        weights, lines = weights_of(drawer(bench.clock), model, slots), []
        full = 2 * sum(weight[0].numel() for weight in weights)
        for name, form in FORMATS.items():
            held = [Quantised(form, weight, weight[0, :1]) for weight in weights]
            parts = {f"data {i}": one.data for i, one in enumerate(held)}
            parts |= {f"scales {i}": one.scales for i, one in enumerate(held)}
            nbytes = Layout.of(parts, slots).nbytes
            case = {"model": model.name, "format": name, "work": "a copy"}
            lines.append(Line(case, {BYTES: nbytes / 1e6, SHARE: nbytes / full}))
        bench.table(f"D {model.width}, F {model.ffn}", lines)


SECTIONS = {"products": products, "experts": experts, "layer": layer, "copies": copies}


if __name__ == "__main__":
    scales = {"toy": TOY, "quick": QUICK, "full": FULL}
    main("fp8", __doc__, SECTIONS, scales, needs=KERNELS)
