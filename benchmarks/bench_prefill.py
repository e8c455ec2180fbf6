"""Time to first token of a transformers model in expert-parallel ranks, while prompts arrive.

    python benchmarks/bench_prefill.py          # a GPU with CUDA MPS, else two cores
    python benchmarks/bench_prefill.py --toy    # two CPU processes, tiny, for CI

On a GPU, eight processes share it (`mps.py`) and serve six layers of Qwen3-30B-A3B; on CPUs, two
processes with a core each serve three layers of eight experts. Weights are random, and prompts are
texts from Python's own library. They arrive as a Poisson process, at fractions of the throughput
without balancing, whether or not earlier prompts are answered. Four variants alternate with the
same prompts:

    unmodified             the model of transformers; every rank holds all experts
    none                   expert parallelism without balancing
    default                expert parallelism with the default settings of ultraep
    forced even routing    `none`, with experts assigned in turn: a ceiling

The model's own router chooses the experts, then a fixed routing: one hot rank, or on CPUs experts
in turn. Before the timing, first tokens of every variant are compared with the unmodified model.

Shapes: n prompts, T tokens, K experts per token, V vocabulary.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import Line, Metric, Mismatch, options_parser
from layers import AFTER, BEFORE, PLAIN, distance, on_ranks, qwen3_config
from load_cases import Shape, draw, ids_with
from mps import device_of_rank, report_of_ranks
from prefill_model import FORCED, NONE, ServedTransformers, add_hook
from timing import free, in_turns, medians, print_progress

from ultraep.workload import Load
from ultraep_tools.demo.even import EvenTurns
from ultraep_tools.demo.prefill import (
    Engine,
    Lengths,
    Prompt,
    Turn,
    from_first,
    make_prompts,
    next_microbatch,
)
from ultraep_tools.demo.text import Text

OURS = "ultraep"
VARIANTS = (PLAIN, NONE, OURS, FORCED)
LABELS = {OURS: "default", FORCED: "forced even routing"}
OWN = "own router"
SEED = 0
VOCABULARY = 256  # bytes of text
COMPARED = 4  # microbatches whose first tokens are compared
FULL = 4  # microbatches of a trial at full load
TRIALS = 3
# Rounding in bfloat16 changes near ties, of first tokens and of the experts that routers choose.
# Unrelated logits differ by 1.4.
ERROR_LIMIT = {"cpu": 1e-4, "cuda": 0.25}  # relative difference of logits
EQUAL_LIMIT = {"cpu": 1.0, "cuda": 0.75}  # share of equal first tokens

P50 = Metric("first_token_p50", "ms", "p50 ms", ".2f")
P95 = Metric("first_token_p95", "ms", "p95 ms", ".2f")
P99 = Metric("first_token_p99", "ms", "p99 ms", ".2f")
SOONER = Metric("first_token_gain_over_none", "ratio", "over none", ".3f")
SERVED = Metric("throughput", "prompts/s", "prompts/s", ".1f")
SPEED = Metric("throughput_tokens", "tokens/s", "tokens/s", ".0f")
FASTER = Metric("throughput_gain_over_none", "ratio", "over none", ".3f")
EQUAL = Metric("first_tokens_equal_to_unmodified", "share", "equal", ".3f")


@dataclass(frozen=True, kw_only=True)
class Scale(Shape):
    """The model, the load, and how long it is measured.

    tokens: of a full microbatch.   hot: the fixed routing; None: experts in turn.
    seconds: of arrivals in a turn.   limit: seconds from the start to the end of the last turn.
    """

    layers: int
    attention: dict[str, int]
    hot: Load | None
    lengths: Lengths
    shares: tuple[float, ...]  # of the throughput without balancing
    slots: int = 1
    rounds: int = 2
    seconds: float = 3.0
    limit: float = 135.0

    @property
    def routings(self) -> tuple[str, str]:
        return OWN, "one hot rank" if self.hot else "even routing"


CARD = Scale(
    hidden=2048,
    ffn=768,
    experts=128,
    top_k=8,
    tokens=2048,
    ranks=8,
    layers=6,
    attention={"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    hot=Load("zipf ordered", 2.0),
    lengths=Lengths(shortest=64, longest=1024, burst=64),
    shares=(0.75, 1.0),
)
CORES = Scale(
    hidden=512,
    ffn=1536,
    experts=8,
    top_k=2,
    tokens=2048,
    ranks=2,
    layers=3,
    attention={"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
    hot=None,
    lengths=Lengths(shortest=128, longest=1024, burst=8),
    shares=(0.5, 0.75, 1.0),
    seconds=10.0,
    limit=600.0,
)
TOY = Scale(
    hidden=32,
    ffn=16,
    experts=8,
    top_k=2,
    tokens=64,
    ranks=2,
    layers=2,
    attention={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    hot=Load("zipf ordered", 1.5),
    lengths=Lengths(shortest=4, longest=16, burst=4),
    shares=(0.5,),
    rounds=1,
    limit=1.0,
)


@dataclass(frozen=True, kw_only=True)
class Served:
    """A turn, and what it served."""

    routing: str
    rate: float  # prompts per second
    variant: str
    turn: Turn


class Rank:
    """The models and engines of one rank. Creating it is collective."""

    def __init__(self, rank: int, scale: Scale, device: torch.device) -> None:
        self.rank, self.scale, self.device = rank, scale, device
        self.texts = Text().training
        self.balanced = self._balanced_model()
        self.plain = ServedTransformers(self._random_model())
        self.progress("models drawn")
        topology = self.balanced.use(NONE)[0].topology
        self.even = add_hook(self.plain.model, EvenTurns(topology, rank).replace)
        if scale.hot is not None:
            loads_E = draw(scale.hot, scale)[rank]
            self.hot_ids_TK = ids_with(loads_E, scale, rank).long().to(device)
        self.fixed = []
        for served in (self.balanced, self.plain):
            in_turn = EvenTurns(topology, rank).replace
            self.fixed.append(add_hook(served.model, self._hot_ids if scale.hot else in_turn))
        self.engine, self.plain_engine = (
            Engine(served, scale.tokens) for served in (self.balanced, self.plain)
        )

    def _hot_ids(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] choices that make one rank hot."""
        return self.hot_ids_TK[: len(ids_TK)]

    def progress(self, text: str) -> None:
        if self.rank == 0:
            print_progress(text)

    def _random_model(self) -> Any:
        """Draw a Qwen3-MoE on the device; the same weights on all ranks."""
        from transformers import Qwen3MoeForCausalLM

        sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": self.scale.layers}
        config = qwen3_config(self.scale, **sizes, **self.scale.attention)
        torch.manual_seed(SEED)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.set_default_dtype(dtype)
        try:
            with self.device:
                return Qwen3MoeForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)

    def _balanced_model(self) -> ServedTransformers:
        """Draw the model with all experts; then keep the home experts of this rank."""
        from ultraep.integrations.transformers import balance

        scale, model = self.scale, self._random_model()
        balance(
            model,
            policy=NONE,
            slots=scale.slots,
            capacity=scale.ranks * scale.rows,  # of all ranks, so that no memory grows in a turn
            timeout=120.0,
        )
        free()
        return ServedTransformers(model)

    def route(self, routing: str) -> None:
        """Let the model's router choose, or use the fixed routing."""
        for hook in self.fixed:
            hook.on = routing != OWN

    def serve(self, prompts: Sequence[Prompt], variant: str) -> Turn:
        """Serve the prompts with one variant."""
        engine = self.plain_engine if variant == PLAIN else self.engine
        return engine.serve(prompts, variant)

    def prompts_at_once(self, tokens: int, *seed: int) -> list[Prompt]:
        """Prompts with about this many tokens, which arrive at the same time."""
        lengths = self.scale.lengths
        arrivals = [0.0] * round(tokens / lengths.mean)
        return make_prompts(arrivals, lengths, [SEED, *seed], self.texts)

    # -- equality --------------------------------------------------------------------------------

    def compare(self, routing: str) -> dict[str, float]:
        """Raise if logits differ; return the share of equal first tokens of every variant."""
        self.route(routing)
        budget = self.scale.tokens
        prompts, batches = self.prompts_at_once(COMPARED * budget, 1, self.rank), []
        for _ in range(COMPARED):  # all ranks run as many
            (batch,) = next_microbatch(prompts, 1, budget)
            del prompts[: len(batch)]
            batches.append([prompt.ids for prompt in batch])
        own, even = (self._logits_of_plain(batches, even=on) for on in (False, True))
        equal = {PLAIN: 1.0}
        for variant in (NONE, OURS, FORCED):
            self.balanced.use(variant)
            logits = torch.cat([self.balanced.last_logits(texts) for texts in batches]).float()
            wanted = even if variant == FORCED else own
            equal[variant] = self._share_of_equal(f"{routing}, {variant}", logits, wanted)
        return equal

    def _logits_of_plain(self, batches: list[list[torch.Tensor]], *, even: bool) -> torch.Tensor:
        """[n, V] logits of the first tokens of the unmodified model."""
        self.even.on = even
        logits = torch.cat([self.plain.last_logits(texts) for texts in batches]).float()
        self.even.on = False
        return logits

    def _share_of_equal(self, what: str, logits: torch.Tensor, wanted: torch.Tensor) -> float:
        """Raise if logits differ; return the share of equal first tokens on the worst rank."""
        unequal = (logits.argmax(-1) != wanted.argmax(-1)).double().mean().item()
        worst = torch.tensor([distance(logits, wanted), unequal], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        error, equal = worst[0].item(), 1 - worst[1].item()
        text = f"{what}: logits differ by {error:.2g}, {equal:.1%} of the first tokens are equal"
        self.progress(text)
        most, least = ERROR_LIMIT[self.device.type], EQUAL_LIMIT[self.device.type]
        if not (error <= most and equal >= least):
            raise Mismatch(
                f"{text}, compared with the unmodified model (limits: {most} and {least:.0%})"
            )
        return equal

    # -- timing ----------------------------------------------------------------------------------

    def full_load(self, routing: str) -> dict[str, float]:
        """Tokens per second of every variant if all prompts arrive at once, after a warm-up."""
        self.route(routing)
        prompts = self.prompts_at_once(FULL * self.scale.ranks * self.scale.tokens, 2)

        def tokens_per_second(variant: str) -> float:
            return self.serve(prompts, variant).tokens_per_second

        speeds = medians(in_turns(VARIANTS, TRIALS, tokens_per_second, warmup=2))
        rounded = {variant: round(speed) for variant, speed in speeds.items()}
        self.progress(f"{routing}: tokens/s at full load: {rounded}")
        return speeds

    def turns(self, routing: str, seconds: float, tokens_per_second: float) -> list[Served]:
        """Serve all variants at all rates; variants take turns at going first."""
        self.route(routing)
        lengths, served = self.scale.lengths, []
        for number in range(self.scale.rounds):
            for place, share in enumerate(self.scale.shares):
                rate = float(f"{share * tokens_per_second / lengths.mean:.3g}")
                seed = [SEED, number, place]
                arrivals = poisson(rate, seconds, seed)
                prompts = make_prompts(arrivals, lengths, [*seed, 1], self.texts)
                first = (number + place) % len(VARIANTS)
                for variant in VARIANTS[first:] + VARIANTS[:first]:
                    turn = self.serve(prompts, variant)
                    served.append(Served(routing=routing, rate=rate, variant=variant, turn=turn))
                    self.progress(f"{routing}, {rate:g} prompts/s, {variant}")
        return served


def poisson(rate: float, seconds: float, seed: Sequence[int]) -> list[float]:
    """Draw arrivals, `rate` per second on average, from second 0 on."""
    rng = np.random.default_rng(list(seed))
    gaps = rng.exponential(1 / rate, size=math.ceil(3 * rate * seconds) + 10)
    later = takewhile(lambda second: second < seconds, np.cumsum(gaps).tolist())
    return [0.0, *later]


def on_rank(number: int, scale: Scale, cuda: bool, began: float) -> dict[str, Any]:
    """One process: compare and time all variants. began: `time.time()` of the start."""
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch uses a slower kernel
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would prepare a plan for every length
    rank = Rank(number, scale, device_of_rank(cuda=cuda))
    equal = {routing: rank.compare(routing) for routing in scale.routings}
    full_load = {routing: rank.full_load(routing) for routing in equal}
    count = len(equal) * len(VARIANTS) * len(scale.shares) * scale.rounds
    left = scale.limit - (time.time() - began)
    seconds: float = from_first(min(scale.seconds, max(0.3, left / count / 1.25)))
    rank.progress(f"{count} turns with {seconds:.1f} s of arrivals each")
    turns = [
        asdict(served)
        for routing, speeds in full_load.items()
        for served in rank.turns(routing, seconds, from_first(speeds[NONE]))
    ]
    rank.balanced.close()
    return {"equal": equal, "full load": full_load, "turns": turns, "seconds": seconds}


# -- tables --------------------------------------------------------------------------------------


def load_lines(served: Sequence[Mapping[str, Any]], prompts_per_second: float) -> list[Line]:
    """A line per rate and variant. prompts_per_second: at full load, without balancing."""
    groups: dict[tuple[float, int], list[Mapping[str, Any]]] = {}
    for one in served:
        groups.setdefault((one["rate"], VARIANTS.index(one["variant"])), []).append(one["turn"])
    waits = {
        key: [1e3 * wait for turn in turns for wait in turn["waited"]]
        for key, turns in groups.items()
    }
    lines = []
    for (rate, place), turns in sorted(groups.items()):
        waited, seconds = waits[rate, place], sum(turn["seconds"] for turn in turns)
        none = np.median(waits[rate, VARIANTS.index(NONE)])
        values = {
            P50: float(np.median(waited)),
            P95: float(np.percentile(waited, 95)),
            P99: float(np.percentile(waited, 99)),
            SOONER: float(none / np.median(waited)),
            SERVED: len(waited) / seconds,
            SPEED: sum(sum(turn["tokens"]) for turn in turns) / seconds,
            BEFORE: mean_of(turns, "before"),
            AFTER: mean_of(turns, "after"),
        }
        variant = LABELS.get(VARIANTS[place], VARIANTS[place])
        case: dict[str, str | float] = {
            "load": f"{rate / prompts_per_second:.0%}",
            "rate": rate,
            "variant": variant,
        }
        lines.append(Line(case, values))
    return lines


def mean_of(turns: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [turn[name] for turn in turns if turn[name] is not None]
    return float(np.mean(values)) if values else None


def full_load_lines(speeds: Mapping[str, float], equal: Mapping[str, float]) -> list[Line]:
    """A line per variant, all prompts at once."""
    lines = []
    for variant, speed in speeds.items():
        values = {SPEED: speed, FASTER: speed / speeds[NONE], EQUAL: equal[variant]}
        lines.append(Line({"variant": LABELS.get(variant, variant)}, values))
    return lines


def main(argv: Sequence[str]) -> None:
    began = time.time()
    options = options_parser(__doc__).parse_args(argv[1:])
    cuda = torch.cuda.is_available() and not options.toy
    scale = TOY if options.toy else CARD if cuda else CORES
    if options.quick:
        scale = replace(scale, shares=scale.shares[-1:])
    lengths = scale.lengths
    about = f"EP{scale.ranks}: {scale.layers} layers, {scale.about}"
    prompts = f"{lengths.shortest} to {lengths.longest} tokens per prompt"
    with report_of_ranks("prefill", argv, scale.ranks, cuda=cuda) as report:
        results = on_ranks(scale.ranks, on_rank, scale, cuda, began)
    for routing, speeds in results["full load"].items():
        report.section = f"{routing}, full load"
        lines = full_load_lines(speeds, results["equal"][routing])
        report.add(f"{about}; {routing}; all prompts at once", lines)
        report.section = routing
        title = f"{about}; {routing}; {prompts}, {scale.tokens} per rank and microbatch"
        turns = [one for one in results["turns"] if one["routing"] == routing]
        report.add(title, load_lines(turns, speeds[NONE] / lengths.mean))
    report.write(options.json)
    report.note(f"{scale.rounds} turns per line, {results['seconds']:.1f} s of arrivals each")


if __name__ == "__main__":
    main(sys.argv)
