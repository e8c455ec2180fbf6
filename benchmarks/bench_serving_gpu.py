"""Time to first token of the serving engine in eight processes on one GPU, while prompts arrive.

    python benchmarks/bench_serving_gpu.py              # needs a GPU, CUDA MPS and transformers
    python benchmarks/bench_serving_gpu.py --toy        # two CPU processes, tiny, for CI

Every process is a rank with a share of the multiprocessors of the GPU (`mps.py`). The engine of
`ultraep bench prefill` serves a random Qwen3-MoE with the layers of Qwen3-30B-A3B. Prompts are
texts from Python's own library and arrive as a Poisson process, at fractions of the throughput
without balancing. Four variants alternate with the same prompts:

    unmodified             the model of transformers; every rank holds all experts
    none                   expert parallelism without balancing
    default                expert parallelism with the default settings of ultraep
    forced even routing    `none`, with experts assigned in turn: a ceiling

The model's own router chooses the experts, then a fixed routing with one hot rank. Before the
timing, the first tokens of every variant are compared with the unmodified model.

Shapes: n prompts, T tokens, K experts per token, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from bench_ranks_gpu import card_name
from harness import Line, Metric, Mismatch, Report, common_options
from layers import AFTER, BEFORE, PLAIN, distance, on_ranks
from load_cases import HotRank, Shape, ids_with
from mps import shared_card
from timing import free, in_turns, on_gpu

from ultraep.tools.serving.engine import Engine, ForcedChoices, from_first
from ultraep.tools.serving.load import Arrival, Lengths, LoadOptions, Prompt, make_prompts
from ultraep.tools.serving.measure import FORCED, Turn, UnderLoad, under_load
from ultraep.tools.serving.run import TransformersModel, random_model
from ultraep.tools.tiny.even import EvenTurns

NONE, OURS = "none", "ultraep"
VARIANTS = (PLAIN, NONE, OURS, FORCED)
LABELS = {OURS: "default", FORCED: "forced even routing"}
OWN, HOT = "own router", "one hot rank"
VOCABULARY = 256  # bytes of text
SEED = 0
COMPARED = 4  # microbatches whose first tokens are compared
FULL = 4  # microbatches of a trial at full load
TRIALS = 3
LONGEST_TURN = 3.0  # seconds of arrivals
# Rounding in bfloat16 changes near ties, of first tokens and of the experts that routers choose.
# Unrelated logits differ by 1.4.
ERROR_LIMIT = {"cpu": 1e-4, "cuda": 0.25}  # relative difference of logits
EQUAL_LIMIT = {"cpu": 1.0, "cuda": 0.75}  # share of equal first tokens

P50 = Metric("first_token_p50", "ms", "p50 ms", ".2f")
P95 = Metric("first_token_p95", "ms", "p95 ms", ".2f")
SOONER = Metric("first_token_gain_over_none", "ratio", "over none", ".3f")
SERVED = Metric("throughput", "prompts/s", "prompts/s", ".1f")
SPEED = Metric("throughput_tokens", "tokens/s", "tokens/s", ".0f")
FASTER = Metric("throughput_gain_over_none", "ratio", "over none", ".3f")
EQUAL = Metric("first_tokens_equal_to_unmodified", "share", "equal", ".3f")
LOST = Metric("unanswered", "prompts", "lost", ".0f")


@dataclass(frozen=True, kw_only=True)
class Scale(Shape):
    """The model, the load, and how long it is measured. tokens: of a full microbatch."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hot: HotRank
    lengths: Lengths
    shares: tuple[float, ...] = (0.75, 1.0)  # of the throughput without balancing
    rounds: int = 2
    limit: float = 135.0  # seconds from the start to the end of the last turn


CARD = Scale(
    hidden=2048,
    ffn=768,
    experts=128,
    top_k=8,
    tokens=2048,
    ranks=8,
    layers=6,
    heads=32,
    kv_heads=4,
    head_dim=128,
    hot=HotRank(2.0),
    lengths=Lengths(shortest=64, longest=1024, burst=64),
)
TOY = Scale(
    hidden=32,
    ffn=16,
    experts=8,
    top_k=2,
    tokens=64,
    ranks=2,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    hot=HotRank(1.5),
    lengths=Lengths(shortest=4, longest=16, burst=4),
    shares=(0.5,),
    rounds=1,
    limit=1.0,
)


class Ranks:
    """The models and engines of one rank. Creating it is collective.

    began: time.time() of the start of the benchmark, for progress and the time limit.
    """

    def __init__(self, rank: int, scale: Scale, device: torch.device, began: float) -> None:
        self.rank, self.scale, self.device, self.began = rank, scale, device, began
        self.balanced = self._balanced_model()
        self.plain = TransformersModel(random_model(self._config(), SEED, device))
        self.print_progress("unmodified model drawn")
        self.even, self.hot = self._forced_choices()
        budget = scale.tokens
        self.engine, self.plain_engine = (
            Engine(model, budget=budget) for model in (self.balanced, self.plain)
        )

    def print_progress(self, text: str) -> None:
        """Print the time since the start and this text, on rank 0."""
        if self.rank == 0:
            elapsed = time.time() - self.began
            print(f"... {elapsed:6.1f} s  {text}", file=sys.stderr, flush=True)

    def _config(self) -> Any:
        from transformers import Qwen3MoeConfig

        scale = self.scale
        return Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=scale.hidden,
            intermediate_size=scale.ffn,
            num_hidden_layers=scale.layers,
            num_attention_heads=scale.heads,
            num_key_value_heads=scale.kv_heads,
            head_dim=scale.head_dim,
            moe_intermediate_size=scale.ffn,
            num_experts=scale.experts,
            num_experts_per_tok=scale.top_k,
            norm_topk_prob=True,
            max_position_embeddings=4096,
            experts_implementation="grouped_mm",
            attn_implementation="sdpa",
            use_cache=False,
        )

    def _balanced_model(self) -> TransformersModel:
        """Draw the model with all experts; then keep the home experts of this rank."""
        from ultraep.integrations.transformers import balance

        scale = self.scale
        model = random_model(self._config(), SEED, self.device)
        self.print_progress("model drawn")
        balance(
            model,
            policy=NONE,
            tokens=scale.tokens,
            capacity=scale.ranks * scale.rows,  # of all ranks, so that no memory grows in a turn
            in_flight=scale.layers,  # every layer keeps its replicas
            timeout=120.0,
        )
        free()
        self.print_progress("model balanced")
        return TransformersModel(model)

    def _forced_choices(self) -> tuple[ForcedChoices, list[ForcedChoices]]:
        """Hooks for even routing of the unmodified model, and for the hot rank of both models."""
        scale = self.scale
        ids_TK = ids_with(scale.hot.draw(scale)[self.rank], scale, seed=self.rank)
        ids_TK = ids_TK.long().to(self.device)

        def hot(chosen_TK: torch.Tensor) -> torch.Tensor:
            return ids_TK[: len(chosen_TK)]

        topology = self.balanced.use(NONE)[0].topology
        even = add_hook(self.plain.model, EvenTurns(topology, self.rank).chosen)
        return even, [add_hook(served.model, hot) for served in (self.balanced, self.plain)]

    def route(self, routing: str) -> None:
        """Let the model's router choose, or one rank be hot."""
        for hook in self.hot:
            hook.on = routing == HOT

    def serve(self, prompts: Sequence[Prompt], variant: str, rate: float, number: int) -> Turn:
        """Serve the prompts with one variant."""
        engine = self.plain_engine if variant == PLAIN else self.engine
        return engine.serve(prompts, variant, rate, number)

    # -- equality --------------------------------------------------------------------------------

    def compare(self, routing: str) -> dict[str, float]:
        """Raise if logits differ; return the share of equal first tokens of every variant."""
        self.route(routing)
        scale, lengths = self.scale, self.scale.lengths
        count = round(COMPARED * scale.tokens / lengths.mean)
        prompts = make_prompts([Arrival(0.0)] * count, lengths, [SEED, 1, self.rank], 1)
        batches: list[list[torch.Tensor]] = [[]]
        for text in map(self.plain.encode, prompts):
            if sum(map(len, batches[-1])) + len(text) > scale.tokens and len(batches) < COMPARED:
                batches.append([])
            if sum(map(len, batches[-1])) + len(text) <= scale.tokens:
                batches[-1].append(text)
        batches += [[] for _ in range(COMPARED - len(batches))]  # all ranks run as many
        own, even = (self._logits(self.plain, batches, even=on) for on in (False, True))
        return {
            PLAIN: 1.0,
            NONE: self._equal(routing, NONE, batches, own),
            OURS: self._equal(routing, OURS, batches, own),
            FORCED: self._equal(routing, FORCED, batches, even),
        }

    def _logits(
        self, served: TransformersModel, batches: list[list[torch.Tensor]], *, even: bool
    ) -> torch.Tensor:
        """[n, V] logits of the first tokens."""
        for choices in (*served.even_choices, self.even):
            choices.on = even
        logits = [served.last_logits(texts)[: len(texts)] for texts in batches]
        for choices in (*served.even_choices, self.even):
            choices.on = False
        return torch.cat(logits).float()

    def _equal(
        self, routing: str, variant: str, batches: list[list[torch.Tensor]], want: torch.Tensor
    ) -> float:
        self.balanced.use(NONE if variant == FORCED else variant)
        got = self._logits(self.balanced, batches, even=variant == FORCED)
        equal = (got.argmax(-1) == want.argmax(-1)).double().mean().item()
        measured = torch.tensor([distance(got, want), 1 - equal], dtype=torch.float64)
        dist.all_reduce(measured, op=dist.ReduceOp.MAX)
        error, unequal = measured.tolist()
        text = f"{routing}, {variant}: logits differ by {error:.2g}, "
        text += f"{1 - unequal:.1%} of the first tokens are equal, on the worst rank"
        self.print_progress(text)
        kind = self.device.type
        if not (error <= ERROR_LIMIT[kind] and 1 - unequal >= EQUAL_LIMIT[kind]):
            limits = f"limits: {ERROR_LIMIT[kind]} and {EQUAL_LIMIT[kind]:.0%}"
            raise Mismatch(f"{text}, compared with the unmodified model ({limits})")
        return float(1 - unequal)

    # -- timing ----------------------------------------------------------------------------------

    def full_load(self, routing: str) -> dict[str, float]:
        """Tokens per second of every variant if all prompts arrive at once, after a warm-up."""
        self.route(routing)
        scale, lengths = self.scale, self.scale.lengths
        count = round(FULL * scale.ranks * scale.tokens / lengths.mean)
        prompts = make_prompts([Arrival(0.0)] * count, lengths, [SEED, 2], 1)

        def tokens_per_second(variant: str) -> float:
            turn = self.serve(prompts, variant, math.inf, 0)
            return sum(turn.tokens) / turn.seconds

        speeds = in_turns(VARIANTS, TRIALS, tokens_per_second, warmup=2)
        medians = {name: median(values) for name, values in speeds.items()}
        shown = ", ".join(f"{name} {speed:,.0f}" for name, speed in medians.items())
        self.print_progress(f"{routing}: tokens/s at full load: {shown}")
        return medians

    def turns(self, routing: str, seconds: float, tokens_per_second: float) -> list[UnderLoad]:
        """Serve all variants at all rates, in turns."""
        self.route(routing)
        scale = self.scale
        most = tokens_per_second / scale.lengths.mean
        rates = [float(f"{share * most:.3g}") for share in scale.shares]
        load = LoadOptions(
            seconds=seconds, rounds=scale.rounds, lengths=scale.lengths, seed=SEED + 3
        )
        turns = []
        for variant, rate, number in load.turns(VARIANTS, rates):
            turns.append(self.serve(load.prompts(rate, number, 1), variant, rate, number))
            if (waited := UnderLoad(variant, rate, (turns[-1],)).percentile(50)) is not None:
                text = f"{routing}, {variant} at {rate:g} prompts/s: median {1e3 * waited:.1f} ms"
                self.print_progress(text)
        return under_load(sorted(turns, key=lambda turn: VARIANTS.index(turn.variant)))


def add_hook(model: Any, choose: Callable[[torch.Tensor], torch.Tensor]) -> ForcedChoices:
    """Add a hook to all experts, which runs before their other hooks."""
    from ultraep.integrations.transformers.balance import registered_experts

    hook = ForcedChoices(choose)
    for module in registered_experts(model).values():
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    return hook


def on_rank(rank: int, scale: Scale, cuda: bool, began: float) -> dict[str, Any]:
    """One process: compare and time all variants."""
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch uses a slower kernel
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would prepare a plan for every length
    ranks = Ranks(rank, scale, device, began)
    equal = {routing: ranks.compare(routing) for routing in (OWN, HOT)}
    full_load = {routing: ranks.full_load(routing) for routing in equal}
    count = len(equal) * len(VARIANTS) * len(scale.shares) * scale.rounds
    left = scale.limit - (time.time() - began)
    seconds: float = from_first(min(LONGEST_TURN, max(0.3, left / count / 1.25)))
    ranks.print_progress(f"{count} turns with {seconds:.1f} s of arrivals each")
    results = {}
    for routing, speeds in full_load.items():
        capacity = from_first(speeds[NONE])
        loads = ranks.turns(routing, seconds, capacity)
        facts = [
            facts_of(load) | {"share": load.rate * scale.lengths.mean / capacity} for load in loads
        ]
        results[routing] = {"loads": facts, "full": speeds, "equal": equal[routing]}
    ranks.balanced.close()
    return {"routings": results, "seconds": seconds}


def facts_of(load: UnderLoad) -> dict[str, Any]:
    """The measured numbers of a variant at a rate, as plain values."""
    return {
        "variant": load.variant,
        "rate": load.rate,
        "p50": load.percentile(50),
        "p95": load.percentile(95),
        "served": load.throughput,
        "speed": load.tokens / load.seconds,
        "lost": load.unanswered,
        "before": load.mean("before"),
        "after": load.mean("after"),
    }


def load_lines(loads: Sequence[dict[str, Any]]) -> list[Line]:
    """A line per rate and variant."""
    lines = []
    for facts in loads:
        none = next(
            load for load in loads if load["variant"] == NONE and load["rate"] == facts["rate"]
        )
        known = none["p50"] is not None and facts["p50"] is not None
        values = {
            P50: None if facts["p50"] is None else 1e3 * facts["p50"],
            P95: None if facts["p95"] is None else 1e3 * facts["p95"],
            SOONER: none["p50"] / facts["p50"] if known else None,
            SERVED: facts["served"],
            SPEED: facts["speed"],
            BEFORE: facts["before"],
            AFTER: facts["after"],
            LOST: facts["lost"],
        }
        case = {
            "load": f"{facts['share']:.0%}",
            "rate": facts["rate"],
            "variant": label(facts["variant"]),
        }
        lines.append(Line(case, values))
    return lines


def full_lines(speeds: dict[str, float], equal: dict[str, float]) -> list[Line]:
    """A line per variant at full load."""
    lines = []
    for variant, speed in speeds.items():
        values = {SPEED: speed, FASTER: speed / speeds[NONE], EQUAL: equal[variant]}
        lines.append(Line({"variant": label(variant)}, values))
    return lines


def label(variant: str) -> str:
    return LABELS.get(variant, variant)


def main(argv: Sequence[str]) -> None:
    began = time.time()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    common_options(parser)
    text = "tokens per rank in a full microbatch (default: 2048)"
    parser.add_argument("--tokens", type=int, metavar="N", help=text)
    text = "fractions of the throughput without balancing (default: 0.75,1)"
    parser.add_argument("--load", type=fractions, metavar="X,Y", help=text)
    text = "seconds for everything; turns become shorter to meet it (default: 135)"
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=text)
    options = parser.parse_args(argv[1:])
    cuda = on_gpu(toy=options.toy) and not options.toy
    scale = TOY if options.toy else CARD
    if options.quick:
        scale = replace(scale, shares=scale.shares[-1:])
    changes = {"tokens": options.tokens, "shares": options.load, "limit": options.limit}
    scale = replace(scale, **{name: value for name, value in changes.items() if value is not None})
    device = f"{card_name()}, {scale.ranks} processes with CUDA MPS" if cuda else None
    report = Report("serving_gpu", argv, device=device)
    report.header()
    with shared_card(scale.ranks) if cuda else nullcontext():
        results = on_ranks(scale.ranks, on_rank, scale, cuda, began)
    about = f"EP{scale.ranks}: {scale.layers} layers, {scale.about}"
    prompts = f"{scale.lengths.shortest} to {scale.lengths.longest} tokens per prompt"
    for routing, result in results["routings"].items():
        report.section = f"{routing}, full load"
        report.add(
            f"{about}; {routing}; all prompts at once", full_lines(result["full"], result["equal"])
        )
        report.section = routing
        report.add(
            f"{about}; {routing}; {prompts}, {scale.tokens} per rank and microbatch",
            load_lines(result["loads"]),
        )
        report.write(options.json)
    report.note(f"{scale.rounds} turns per line, {results['seconds']:.1f} s of arrivals each")


def fractions(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))


if __name__ == "__main__":
    main(sys.argv)
