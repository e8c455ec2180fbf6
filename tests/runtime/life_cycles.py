"""Random life cycles of layers: the actions of a training program, in any order.

`Program.drawn(seed)` draws layers, a balancer and a list of actions. `OnRank` and `Dense` take the
same actions: one rank of a balanced model, and the same model in one process without experts
elsewhere. Both return what they observed, which must agree (`assert_agree`).

Actions, with n a microbatch and l a layer:

    forward n     through some layers, perhaps checkpointed or with replayed routes; also without
                  gradients
    backward n    of one or two microbatches that wait, in any order
    drop n        its backward is never run; one rank keeps its outputs
    write l       of all expert weights, in one of several ways
    copy l        a deep copy, with other weights, becomes a further layer
    fail n        an exception in forward or in backward, on all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cases  # noqa: F401  registers a policy, also in processes
import numpy as np
import torch
from dense import DenseMoE, Example, assert_close, network
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ultraep import BalancedMoE, Balancer, ConfigError, ExpertsFrom, Topology
from ultraep.routes import Replay

HIDDEN, FFN = 6, 4
WEIGHTS = ("gate_up_proj", "down_proj")
FORMS = ("experts", "stacked", "list", "functions")
SELECTIVE = ("mm", "all ops")
CHECKPOINTS = ("none", "none", "each", "all", "reentrant each", "reentrant all", *SELECTIVE)
WRITES = ("in place", "data", "optimizer", "fused optimizer", "load")
FAILURES = ("router", "experts", "rows", "recompute")
Observed = list[tuple[str, torch.Tensor]]  # how ranks are joined, and what was observed


class Failure(Exception):
    """Raised by hooks and routers on request."""


@dataclass
class Program:
    """Layers, the options of a balancer, and a list of actions."""

    tokens: list[int]
    experts: int
    top_k: int
    forms: list[str]
    options: dict[str, Any]
    actions: list[tuple[Any, ...]] = field(default_factory=list)
    seed: int = 0
    dispatcher: dict[str, Any] | None = None  # options of `Shuffling`; None: the data plane
    replayed: frozenset[int] = frozenset()  # microbatches with recorded routes

    @classmethod
    def drawn(cls, seed: int, most_ranks: int, most_actions: int) -> Program:
        draw = np.random.default_rng(seed)
        ranks = int(draw.integers(1, most_ranks + 1))
        experts = int(draw.integers(max(2, ranks), 7))
        policy = str(draw.choice(["ultraep"] * 5 + ["registered", "none"]))
        options = {
            "slots": int(draw.integers(1, 3)),
            "experts": sorted(int(home) for home in draw.integers(0, ranks, experts)),
            "policy": policy,
            "in_flight": int(draw.integers(1, 5)),
        }
        program = cls(
            tokens=[int(count) for count in draw.integers(1, 12, ranks)],
            experts=experts,
            top_k=int(draw.integers(1, min(3, experts) + 1)),
            forms=[str(draw.choice(FORMS)) for _ in range(int(draw.integers(1, 4)))],
            options=options,
            seed=seed,
        )
        _Drawing(program, draw).run(int(draw.integers(4, most_actions + 1)))
        more = np.random.default_rng([seed, 1])
        if more.random() < 0.4:
            rows = int(more.integers(0, 4))
            program.dispatcher = {"ordered": more.random() < 0.5, "padding_rows": rows}
        program.replayed = frozenset(n for n in range(99) if n % 5 == seed % 7)
        return program

    def example(self, layer: int) -> Example:
        return Example(
            self.tokens,
            experts=self.experts,
            top_k=self.top_k,
            hidden=HIDDEN,
            ffn=FFN,
            skew=2.0 if layer % 2 else -2.0,  # the next layer likes other experts
            normalize_top_k=False,
            seed=100 * self.seed + layer,
        )

    def inputs(self, number: int) -> list[torch.Tensor]:
        """Return the tokens of every rank; microbatches n and n + 5 have the same tokens."""
        draw = torch.Generator().manual_seed(1000 * self.seed + number % 5)
        shapes = [(count, HIDDEN) for count in self.tokens]
        every = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
        for tokens in every:
            tokens[:, 0] = 1.0  # what the skew looks at
        return every

    def routes(self, number: int) -> list[torch.Tensor]:
        """Return [T, K] the recorded ids of every rank, for all layers; -1: the router decides."""
        draw = torch.Generator().manual_seed(333 * self.seed + number % 5)
        scores = [torch.rand(count, self.experts, generator=draw) for count in self.tokens]
        ids = [part.topk(self.top_k).indices for part in scores]
        return [part.masked_fill(torch.arange(len(part))[:, None] % 4 == 3, -1) for part in ids]

    def gradients(self, number: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(7777 * self.seed + number)
        return [torch.randn(n, HIDDEN, generator=draw, dtype=torch.float64) for n in self.tokens]


class _Drawing:
    """Draws actions that are valid after the actions before them."""

    def __init__(self, program: Program, draw: np.random.Generator) -> None:
        self.program, self.draw = program, draw
        self.waiting: dict[int, str] = {}  # microbatches, and how they are checkpointed
        self.layers, self.number = len(program.forms), 0

    def run(self, count: int) -> None:
        kinds = ("forward",) * 5 + ("backward",) * 4 + ("drop", "write", "write", "copy")
        kinds += ("fail forward", "fail backward", "infer")
        while len(self.program.actions) < count:
            self._add(str(self.draw.choice(kinds)))
        while self.waiting:
            self._add("backward")

    def _add(self, kind: str) -> None:
        make: Callable[[], tuple[Any, ...] | None] = getattr(self, "_" + kind.replace(" ", "_"))
        action = make()
        if action is not None:
            self.program.actions.append(action)

    def _one_of(self, values: Any) -> Any:
        return values[int(self.draw.integers(len(values)))]

    def _chain(self) -> list[int]:
        return self.draw.integers(0, self.layers, int(self.draw.integers(1, 4))).tolist()

    def _forward(self) -> tuple[Any, ...] | None:
        if len(self.waiting) > 3:
            return None
        self.number += 1
        how = self.waiting[self.number] = self._one_of(CHECKPOINTS)
        return "forward", self.number, self._chain(), how

    def _infer(self) -> tuple[Any, ...]:
        self.number += 1
        return "infer", self.number, self._chain()

    def _backward(self) -> tuple[Any, ...] | None:
        if not self.waiting:
            return None
        count = min(len(self.waiting), int(self.draw.integers(1, 3)))
        chosen = self.draw.permutation(list(self.waiting))[:count].tolist()
        for number in chosen:
            del self.waiting[number]
        return "backward", chosen

    def _drop(self) -> tuple[Any, ...] | None:
        if not self.waiting:
            return None
        chosen = self._one_of(list(self.waiting))
        del self.waiting[chosen]
        return "drop", chosen

    def _write(self) -> tuple[Any, ...] | None:
        if self.waiting:  # autograd would refuse their backward
            return None
        layer = int(self.draw.integers(self.layers))
        return "write", layer, self._one_of(WRITES), float(self.draw.uniform(0.5, 1.5))

    def _copy(self) -> tuple[Any, ...] | None:
        if self.layers > 4:
            return None
        layer = int(self.draw.integers(self.layers))
        self.layers += 1
        return "copy", layer, float(self.draw.uniform(0.5, 1.5))

    def _fail_forward(self) -> tuple[Any, ...]:
        self.number += 1
        return "fail forward", self.number, self._chain(), self._one_of(CHECKPOINTS)

    def _fail_backward(self) -> tuple[Any, ...] | None:
        if not self.waiting:
            return None
        chosen = self._one_of(list(self.waiting))
        # Torch allows one backward pass under selective checkpointing.
        again = self.waiting[chosen] not in SELECTIVE and bool(self.draw.integers(2))
        if not again:
            del self.waiting[chosen]
        return "fail backward", chosen, self._one_of(FAILURES), again


class Machine:
    """Takes the actions of a program.

    A subclass creates the layers and has `mine` (its share of all tokens), `through` (run layers),
    `parameter_gradients`, `weights` and `write`.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.layers: list[nn.Module] = []
        self.waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.observed: Observed = []

    def run(self) -> Observed:
        for name, *given in self.program.actions:
            getattr(self, name.replace(" ", "_"))(*given)
        return self.observed

    def tokens(self, number: int) -> torch.Tensor:
        return self.mine(self.program.inputs(number))

    def forward(self, number: int, chain: list[int], how: str) -> None:
        x = self.tokens(number).requires_grad_()
        with self.replaying(number):
            y = self.through(chain, how, x)
        self.waiting[number] = x, y
        self.observed.append(("tokens", y.detach().clone()))

    def replaying(self, number: int) -> AbstractContextManager[Any]:
        """Return a context in which routers choose the routes of the microbatch, if it has any."""
        return nullcontext()

    def infer(self, number: int, chain: list[int]) -> None:
        with torch.no_grad():
            y = self.through(chain, "none", self.tokens(number))
        self.observed.append(("tokens", y.clone()))

    def loss(self, number: int) -> torch.Tensor:
        return (self.waiting[number][1] * self.mine(self.program.gradients(number))).sum()

    def backward(self, numbers: list[int]) -> None:
        torch.stack([self.loss(number) for number in numbers]).sum().backward()
        for number in numbers:
            x, _ = self.waiting.pop(number)
            self.observed.append(("tokens", x.grad))
        for layer in self.layers:
            self.observed += self.parameter_gradients(layer)

    def drop(self, number: int) -> None:
        del self.waiting[number]

    def forget_gradients(self) -> None:
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.grad = None
        for x, _ in self.waiting.values():
            x.grad = None

    def fail_backward(self, number: int, where: str, again: bool) -> None:
        self.failing_backward(number, where)
        self.forget_gradients()
        if not again:
            self.drop(number)

    def failing_backward(self, number: int, where: str) -> None:
        """Run a backward pass that raises; its gradients are dropped, so `Dense` does nothing."""

    def fail_forward(self, number: int, chain: list[int], how: str) -> None:
        """Run a forward pass that raises."""

    def copy(self, layer: int, factor: float) -> None:
        copied = deepcopy(self.layers[layer])
        self.layers.append(copied)
        self.scale(copied, factor)

    @torch.no_grad()
    def scale(self, layer: nn.Module, factor: float) -> None:
        for weight in self.weights(layer):
            weight.mul_(factor)

    def step(self, layer: nn.Module, *, fused: bool) -> None:
        for weight in self.weights(layer):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        torch.optim.SGD(self.weights(layer), lr=0.01, fused=fused).step()


class Dense(Machine):
    """All tokens and all experts in one process."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        for number in range(len(program.forms)):
            example = program.example(number)
            self.layers.append(DenseMoE(example.state, program.top_k, normalize_top_k=False))

    def mine(self, every: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(every)

    @contextmanager
    def replaying(self, number: int) -> Iterator[None]:
        ids = torch.cat(self.program.routes(number)) if number in self.program.replayed else None
        for layer in self.layers:
            layer.replaced = None if ids is None else partial(_recorded, layer, ids)
        yield
        for layer in self.layers:
            layer.replaced = None

    def through(self, chain: list[int], how: str, x: torch.Tensor) -> torch.Tensor:
        for number in chain:
            x = x + self.layers[number](x)
        return x

    def parameter_gradients(self, layer: nn.Module) -> Observed:
        names = ("router.weight", *(f"experts.{name}" for name in WEIGHTS))
        actual = ((name, layer.get(name)) for name in names)
        return [(name, _gradient(weight)) for name, weight in actual]

    def weights(self, layer: nn.Module) -> list[nn.Parameter]:
        return [layer.get(f"experts.{name}") for name in WEIGHTS]

    def write(self, layer: int, how: str, factor: float) -> None:
        if "optimizer" in how:
            self.step(self.layers[layer], fused=False)
        else:
            self.scale(self.layers[layer], factor)
        self.forget_gradients()


def _recorded(layer: nn.Module, ids: torch.Tensor, tokens: torch.Tensor) -> tuple[Any, Any]:
    own, _ = layer.route(tokens)
    ids = torch.where(ids < 0, own, ids)
    scores = (tokens @ layer.get("router.weight").T).softmax(-1)
    return ids, torch.take_along_dim(scores, ids, -1)


class Holder(nn.Module):
    """The weights of home experts, stored like in modules of other libraries."""

    def __init__(self, state: dict[str, torch.Tensor], homes: list[int], *, lists: bool) -> None:
        super().__init__()
        for name in WEIGHTS:
            mine = state[f"experts.{name}"][homes].clone()
            split = nn.ParameterList([nn.Parameter(one) for one in mine]) if lists else None
            setattr(self, name, split if split else nn.Parameter(mine))

    def gate_up(self) -> torch.Tensor:
        return self.gate_up_proj

    def down(self) -> torch.Tensor:
        return self.down_proj

    def bundle(self, form: str) -> dict[str, Any]:
        if form == "functions":
            return {"gate_up_proj": self.gate_up, "down_proj": self.down}
        stacks = {name: getattr(self, name) for name in WEIGHTS}
        lists = {n: isinstance(stack, nn.ParameterList) for n, stack in stacks.items()}
        return {n: list(stack) if lists[n] else stack for n, stack in stacks.items()}


class OnRank(Machine):
    def __init__(self, program: Program, balancer: Balancer) -> None:
        super().__init__(program)
        self.balancer = balancer
        self.fails: str | None = None  # where an exception is raised next
        self.kept: list[Any] = []  # outputs whose backward never runs
        for number, form in enumerate(program.forms):
            self.layers.append(self._layer(program.example(number), form))

    def _layer(self, example: Example, form: str) -> BalancedMoE:
        layer, holder = example.layer(self.balancer), None
        homes = list(layer.experts.home_experts)
        if form != "experts":
            holder = Holder(example.state, homes, lists=form == "list")
            experts = ExpertsFrom(network, holder.bundle(form), homes)
            layer = BalancedMoE(layer.router, experts, balancer=self.balancer)
        layer.holder, layer.form = holder, form
        self._watch(layer)
        return layer

    def _watch(self, layer: BalancedMoE) -> None:
        """Add hooks that raise on request, in place of the hooks of the copied layer."""
        for module in (layer.router, layer.experts):
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        layer.router.register_forward_pre_hook(lambda *_: self._raise_at("router", "recompute"))
        layer.experts.register_forward_pre_hook(lambda _, given: self._hook(given[0].rows, "rows"))
        layer.experts.register_forward_hook(lambda _, __, outputs: self._hook(outputs, "experts"))

    def _hook(self, tensor: torch.Tensor, where: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._raise_at(where))

    def _raise_at(self, *places: str) -> None:
        if self.fails in places:
            self.fails = None
            raise Failure

    def mine(self, every: list[torch.Tensor]) -> torch.Tensor:
        return every[self.balancer.rank].clone()

    @contextmanager
    def replaying(self, number: int) -> Iterator[None]:
        if number not in self.program.replayed:
            yield
            return
        with Replay(nn.ModuleList(self.layers)) as replay:
            ids = self.mine(self.program.routes(number))
            replay.use(ids.expand(len(self.layers), -1, -1))
            yield

    def drop(self, number: int) -> None:
        if self.balancer.rank == 0:
            self.kept.append(self.waiting[number])
        super().drop(number)

    def through(self, chain: list[int], how: str, x: torch.Tensor) -> torch.Tensor:
        if how in SELECTIVE and not (self.program.dispatcher or {"ordered": True})["ordered"]:
            with suppress(ConfigError):
                self._through(chain, how, x)
                raise AssertionError("selective checkpointing of rows in any order")
            how = "all"
        return self._through(chain, how, x)

    def _through(self, chain: list[int], how: str, x: torch.Tensor) -> torch.Tensor:
        def layers(x: torch.Tensor, numbers: list[int] = chain) -> torch.Tensor:
            for number in numbers:
                x = x + self.layers[number](x)
            return x

        again = checkpointing(how)
        if "each" not in how:
            return again(layers, x)
        for number in chain:
            x = again(partial(layers, numbers=[number]), x)
        return x

    def parameter_gradients(self, layer: nn.Module) -> Observed:
        actual: Observed = [("router.weight", _gradient(layer.router.weight))]
        for name in WEIGHTS:
            stack = getattr(layer.holder or layer.experts, name)
            if isinstance(stack, nn.ParameterList):
                gradient = torch.stack([_gradient(one) for one in stack])
            else:
                gradient = _gradient(stack)
            actual.append((f"experts.{name}", gradient))
        return actual

    def weights(self, layer: nn.Module) -> list[nn.Parameter]:
        return list((layer.holder or layer.experts).parameters())

    def copy(self, layer: int, factor: float) -> None:
        super().copy(layer, factor)
        self._watch(self.layers[-1])

    def write(self, layer: int, how: str, factor: float) -> None:
        written = self.layers[layer]
        if "optimizer" in how:
            self.step(written, fused=how == "fused optimizer")
        elif how == "in place":
            self.scale(written, factor)
        elif how == "data":
            for weight in self.weights(written):
                weight.data.mul_(factor)
        else:
            module, assign = written.holder or written.experts, written.form in FORMS[::3]
            state = {name: factor * value for name, value in module.state_dict().items()}
            module.load_state_dict(state, assign=assign)
        self.forget_gradients()

    def fail_forward(self, number: int, chain: list[int], how: str) -> None:
        self.fails = "router"
        try:
            self.through(chain, how, self.tokens(number).requires_grad_())
        except Failure:
            return
        raise AssertionError("forward did not fail")

    def failing_backward(self, number: int, where: str) -> None:
        self.fails = where
        with suppress(Failure):
            self.loss(number).backward(retain_graph=True)
        self.fails = None  # without checkpointing there is no router in backward


def checkpointing(how: str) -> Callable[..., torch.Tensor]:
    """Return a caller of functions whose forward pass backward may recompute."""
    if how == "none":
        return lambda function, *given: function(*given)
    if how in SELECTIVE:
        kept = [torch.ops.aten.mm.default] if how == "mm" else _keep_all
        contexts = partial(create_selective_checkpoint_contexts, kept)
        return partial(checkpoint, use_reentrant=False, context_fn=contexts)
    return partial(checkpoint, use_reentrant="reentrant" in how)


def _keep_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def assert_agree(program: Program, ranks: list[Observed]) -> None:
    """Check that all ranks together observed the same as the dense model."""
    homes = Topology(
        ranks=len(program.tokens), experts=program.experts, homes=program.options["experts"]
    )
    by_rank = torch.from_numpy(homes.experts_by_rank.copy())
    expected = Dense(program).run()
    assert {len(observed) for observed in ranks} == {len(expected)}
    for number, (name, value) in enumerate(expected):
        parts = [observed[number][1] for observed in ranks]
        if name.startswith("experts."):
            actual, value = torch.cat(parts), value[by_rank]
        elif name == "tokens":
            actual = torch.cat(parts)
        else:
            actual = torch.stack(parts).sum(dim=0)
        assert_close(actual, value, f"seed {program.seed}, observation {number} ({name})")
