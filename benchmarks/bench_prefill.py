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

import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from harness import Line, Metric, Mismatch, options_parser
from layers import AFTER, BEFORE, PLAIN, distance, on_ranks, qwen3_config
from load_cases import HotRank, Shape, ids_with
from mps import device_of_rank, report_of_ranks
from timing import free, in_turns, medians, on_gpu, print_progress
from ultraep_tools.serving.engine import Engine, EvenTurns, ForcedChoices, from_first, policy_of
from ultraep_tools.serving.load import (
    Arrival,
    Lengths,
    LoadOptions,
    Prompt,
    make_prompts,
    next_microbatch,
)
from ultraep_tools.serving.measure import FORCED, Turn, under_load
from ultraep_tools.serving.run import TransformersModel, random_model

NONE, OURS = "none", "ultraep"
VARIANTS = (PLAIN, NONE, OURS, FORCED)
LABELS = {OURS: "default", FORCED: "forced even routing"}
OWN, HOT = "own router", "one hot rank"
SEED = 0
VOCABULARY = 256  # bytes of text
COMPARED = 4  # microbatches whose first tokens are compared
FULL = 4  # microbatches of a trial at full load
TRIALS = 3
TURN_FIELDS = ("variant", "rate", "number", "waited", "tokens", "seconds", "before", "after")
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
    attention: dict[str, int]
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
    attention={"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
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
    attention={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    hot=HotRank(1.5),
    lengths=Lengths(shortest=4, longest=16, burst=4),
    shares=(0.5,),
    rounds=1,
    limit=1.0,
)


class Rank:
    """The models and engines of one rank. Creating it is collective."""

    def __init__(self, rank: int, scale: Scale, device: torch.device) -> None:
        self.rank, self.scale, self.device = rank, scale, device
        self.balanced = self._balanced_model()
        self.plain = TransformersModel(self._random_model())
        self.progress("models drawn")
        topology = self.balanced.use(NONE)[0].topology
        self.even = add_hook(self.plain, EvenTurns(topology, rank).chosen)
        ids_TK = ids_with(scale.hot.draw(scale)[rank], scale, seed=rank).long().to(device)
        models = self.balanced, self.plain
        self.hot = [add_hook(model, lambda chosen: ids_TK[: len(chosen)]) for model in models]
        self.engine, self.plain_engine = (Engine(model, budget=scale.tokens) for model in models)

    def progress(self, text: str) -> None:
        if self.rank == 0:
            print_progress(text)

    def _random_model(self) -> Any:
        sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": self.scale.layers}
        config = qwen3_config(self.scale, **sizes, **self.scale.attention)
        return random_model(config, SEED, self.device)

    def _balanced_model(self) -> TransformersModel:
        """Draw the model with all experts; then keep the home experts of this rank."""
        from ultraep.integrations.transformers import balance

        scale, model = self.scale, self._random_model()
        balance(
            model,
            policy=NONE,
            capacity=scale.ranks * scale.rows,  # of all ranks, so that no memory grows in a turn
            timeout=120.0,
        )
        free()
        return TransformersModel(model)

    def route(self, routing: str) -> None:
        """Let the model's router choose, or one rank be hot."""
        for hook in self.hot:
            hook.on = routing == HOT

    def serve(self, prompts: Sequence[Prompt], variant: str, rate: float, number: int) -> Turn:
        """Serve the prompts with one variant."""
        engine = self.plain_engine if variant == PLAIN else self.engine
        return engine.serve(prompts, variant, rate, number)

    def prompts_at_once(self, tokens: int, *seed: int) -> list[Prompt]:
        """Prompts with about this many tokens, which arrive at the same time."""
        lengths = self.scale.lengths
        arrivals = [Arrival(0.0)] * round(tokens / lengths.mean)
        return make_prompts(arrivals, lengths, [SEED, *seed], 1)

    # -- equality --------------------------------------------------------------------------------

    def compare(self, routing: str) -> dict[str, float]:
        """Raise if logits differ; return the share of equal first tokens of every variant."""
        self.route(routing)
        budget = self.scale.tokens
        prompts, batches = self.prompts_at_once(COMPARED * budget, 1, self.rank), []
        for _ in range(COMPARED):  # all ranks run as many
            (batch,) = next_microbatch(prompts, 1, budget)
            del prompts[: len(batch)]
            batches.append([self.plain.encode(prompt) for prompt in batch])
        own, even = (self._logits(self.plain, batches, even=on) for on in (False, True))
        equal = {PLAIN: 1.0}
        for variant in (NONE, OURS, FORCED):
            self.balanced.use(policy_of(variant))
            logits = self._logits(self.balanced, batches, even=variant == FORCED)
            wanted = even if variant == FORCED else own
            equal[variant] = self._share_of_equal(f"{routing}, {variant}", logits, wanted)
        return equal

    def _logits(
        self, served: TransformersModel, batches: list[list[torch.Tensor]], *, even: bool
    ) -> torch.Tensor:
        """[n, V] logits of the first tokens."""
        for choices in (*served.even_choices, self.even):
            choices.on = even
        logits = [served.last_logits(texts)[: len(texts)] for texts in batches]
        self.even.on = False
        return torch.cat(logits).float()

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
            turn = self.serve(prompts, variant, math.inf, 0)
            return sum(turn.tokens) / turn.seconds

        speeds = medians(in_turns(VARIANTS, TRIALS, tokens_per_second, warmup=2))
        rounded = {variant: round(speed) for variant, speed in speeds.items()}
        self.progress(f"{routing}: tokens/s at full load: {rounded}")
        return speeds

    def turns(self, routing: str, seconds: float, tokens_per_second: float) -> list[Turn]:
        """Serve all variants at all rates, in turns."""
        self.route(routing)
        lengths, rounds = self.scale.lengths, self.scale.rounds
        most = tokens_per_second / lengths.mean
        rates = [float(f"{share * most:.3g}") for share in self.scale.shares]
        load = LoadOptions(seconds=seconds, rounds=rounds, lengths=lengths, seed=SEED + 3)
        turns = [
            self.serve(load.prompts(rate, number, 1), variant, rate, number)
            for variant, rate, number in load.turns(VARIANTS, rates)
        ]
        self.progress(f"{routing}: {len(turns)} turns served")
        return turns


def add_hook(
    served: TransformersModel, choose: Callable[[torch.Tensor], torch.Tensor]
) -> ForcedChoices:
    """Add a hook to all experts, which runs before their other hooks."""
    from ultraep.integrations.transformers.balance import registered_experts

    hook = ForcedChoices(choose)
    for module in registered_experts(served.model).values():
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    return hook


def on_rank(number: int, scale: Scale, cuda: bool, began: float) -> dict[str, Any]:
    """One process: compare and time all variants. began: `time.time()` of the start."""
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch uses a slower kernel
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would prepare a plan for every length
    rank = Rank(number, scale, device_of_rank(cuda=cuda))
    equal = {routing: rank.compare(routing) for routing in (OWN, HOT)}
    full_load = {routing: rank.full_load(routing) for routing in equal}
    count = len(equal) * len(VARIANTS) * len(scale.shares) * scale.rounds
    left = scale.limit - (time.time() - began)
    seconds: float = from_first(min(LONGEST_TURN, max(0.3, left / count / 1.25)))
    rank.progress(f"{count} turns with {seconds:.1f} s of arrivals each")
    routings = {}
    for routing, speeds in full_load.items():
        turns = rank.turns(routing, seconds, from_first(speeds[NONE]))
        served = [{name: getattr(turn, name) for name in TURN_FIELDS} for turn in turns]
        routings[routing] = {"turns": served, "full load": speeds, "equal": equal[routing]}
    rank.balanced.close()
    return {"routings": routings, "seconds": seconds}


def load_lines(turns: Sequence[Turn], prompts_per_second: float) -> list[Line]:
    """A line per rate and variant. prompts_per_second: at full load, without balancing."""
    loads = under_load(sorted(turns, key=lambda turn: VARIANTS.index(turn.variant)))
    p50_of_none = {load.rate: load.percentile(50) for load in loads if load.variant == NONE}
    lines = []
    for load in loads:
        none, p50, p95 = p50_of_none[load.rate], load.percentile(50), load.percentile(95)
        values = {
            P50: 1e3 * p50 if p50 else None,
            P95: 1e3 * p95 if p95 else None,
            SOONER: none / p50 if none and p50 else None,
            SERVED: load.throughput,
            SPEED: load.tokens / load.seconds,
            BEFORE: load.mean("before"),
            AFTER: load.mean("after"),
            LOST: load.unanswered,
        }
        share = f"{load.rate / prompts_per_second:.0%}"
        variant = LABELS.get(load.variant, load.variant)
        lines.append(Line({"load": share, "rate": load.rate, "variant": variant}, values))
    return lines


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
    cuda = on_gpu(toy=options.toy) and not options.toy
    scale = TOY if options.toy else CARD
    if options.quick:
        scale = replace(scale, shares=scale.shares[-1:])
    lengths = scale.lengths
    about = f"EP{scale.ranks}: {scale.layers} layers, {scale.about}"
    prompts = f"{lengths.shortest} to {lengths.longest} tokens per prompt"
    with report_of_ranks("serving_gpu", argv, scale.ranks, cuda=cuda) as report:
        results = on_ranks(scale.ranks, on_rank, scale, cuda, began)
    for routing, result in results["routings"].items():
        speeds, turns = result["full load"], [Turn(**turn) for turn in result["turns"]]
        report.section = f"{routing}, full load"
        lines = full_load_lines(speeds, result["equal"])
        report.add(f"{about}; {routing}; all prompts at once", lines)
        report.section = routing
        title = f"{about}; {routing}; {prompts}, {scale.tokens} per rank and microbatch"
        report.add(title, load_lines(turns, speeds[NONE] / lengths.mean))
    report.write(options.json)
    report.note(f"{scale.rounds} turns per line, {results['seconds']:.1f} s of arrivals each")


if __name__ == "__main__":
    main(sys.argv)
