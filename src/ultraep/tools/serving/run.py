"""The load test of the engine: a transformers model on ranks of this machine, all turns.

The model is a checkpoint, or random, small and dominated by its experts. Before the first turn, a
calibration of some seconds measures the size of microbatches, the min rows of a replica, and the
rates to test.

Shapes: n prompts, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ultraep.backends import wait_until_compiled
from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.tools.inspect.checkpoint import read_config
from ultraep.tools.inspect.library import transformers
from ultraep.tools.inspect.texts import Encode, hashed_words, tokenizer_of
from ultraep.tools.launch.group import process_group, settle
from ultraep.tools.launch.processes import RankPlace, run_ranks
from ultraep.tools.serving.engine import Engine, EvenChoices, check_variants, from_first
from ultraep.tools.serving.load import Arrival, LoadOptions, Prompt, make_prompts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ultraep.runtime.balancer import Balancer

RANDOM = {
    "vocab_size": 256,  # bytes
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
}
BYTES_PER_TOKEN = 8  # enough text for one token of a checkpoint's tokenizer
PACKING_TOLERANCE = 1e-3  # relative difference of a prompt's logits alone and in a pack
ROUTINGS = ("own", "even")
MOST_RANKS = 64
MICROBATCH_SECONDS = 0.5  # duration of a full microbatch, for the calibrated budget
SMALLEST, LARGEST, STEP = 32, 4096, 16  # range of the calibrated budget, in tokens
FULL, TRIALS = 4, 3  # microbatches per trial, and trials; the fastest trial counts
PAYS = 2.0  # a replica must save this multiple of its cost
TRIAL_ROUND = 1 << 20  # seeds the prompts of trials; rounds have smaller numbers

Report = Callable[[Any], None]  # called with `Calibrated`, then with every `Turn`


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the engine.

    model: directory of a checkpoint; None: random.   variants: policies to compare.
    budget: max tokens per rank in a microbatch; None: calibrated.
    routing: "own" (the model's router) or "even" for all variants.
    """

    load: LoadOptions
    variants: tuple[str, ...] = ("none", "eplb", "ultraep", "even")
    ranks: int = 2
    slots: int = 2
    model: str | None = None
    budget: int | None = None
    routing: str = "own"

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ConfigError(f"--ranks must lie between 1 and {MOST_RANKS}, got {self.ranks}")
        if self.slots < 0:
            raise ConfigError(f"--slots must not be negative, got {self.slots}")
        if self.budget is not None and self.budget < 1:
            raise ConfigError(f"--budget must be at least 1, got {self.budget}")
        if self.routing not in ROUTINGS:
            raise ConfigError(
                f"--routing must be one of {', '.join(ROUTINGS)}, got {self.routing!r}"
            )


def check(options: EngineOptions) -> ModelFacts:
    """Return facts about the model; raise if it cannot be served or prompts are too long."""
    check_variants(options.variants)
    facts = facts_of(options.model)
    if options.load.longest > facts.longest:
        raise ConfigError(
            f"prompts have up to {options.load.longest} tokens, but {facts.name} takes "
            f"{facts.longest}; lower --longest, or the tokens in --arrivals"
        )
    if options.ranks > facts.experts:
        raise ConfigError(f"--ranks {options.ranks}, but {facts.name} has {facts.experts} experts")
    return facts


def run(options: EngineOptions, report: Report) -> None:
    """Start the ranks and pass on their measurements. On interruption they end."""
    run_ranks("ultraep.tools.serving.run:work", options, options.ranks, report)


def work(place: RankPlace, options: EngineOptions, report: Report) -> None:
    """Run one rank; only rank 0 reports."""
    settle(place, "cpu")
    report = report if place.rank == 0 else lambda _: None
    with process_group(place), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch uses a slower kernel
        model = TransformersModel(
            options.model,
            dist.new_group(),  # a group of its own, apart from the messages of the engine
            options.load.seed,
            slots=options.slots,
            in_flight=facts_of(options.model).layers,  # every layer keeps its replicas
        )
        model.check_packing()
        for balancer in model.balancers:
            balancer.config = BalanceConfig(policy="none", objective="balance")
        engine = Engine(model, routing=options.routing)
        calibrated = calibrate(engine, options, model.bytes_per_token)
        report(calibrated)
        for variant, rate, number in options.load.turns(options.variants, calibrated.rates):
            prompts = options.load.prompts(rate, number, model.bytes_per_token)
            report(engine.serve(prompts, variant, rate, number))
        for balancer in model.balancers:
            balancer.close()


# -- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model before it is built."""

    name: str
    parameters: int
    layers: int  # with experts
    experts: int
    top_k: int
    longest: int  # prompt, in tokens
    nbytes: int  # of the weights in float32


def config_of(folder: str | None) -> Any:
    """The configuration of a checkpoint, or of the random model."""
    if folder is not None:
        return read_config(Path(folder))
    return transformers().Qwen3MoeConfig(**RANDOM, experts_implementation="grouped_mm")


def facts_of(folder: str | None) -> ModelFacts:
    """Facts from a model on the meta device; raises for a model without experts."""
    from ultraep.integrations.transformers.balance import registered_experts

    config = config_of(folder)
    with torch.device("meta"):
        model = transformers().AutoModelForCausalLM.from_config(config)
    modules = list(registered_experts(model).values())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    text = config.get_text_config()
    return ModelFacts(
        name="random Qwen3-MoE" if folder is None else Path(folder).resolve().name,
        parameters=parameters,
        layers=len(modules),
        experts=max(module.num_experts for module in modules),
        top_k=int(getattr(text, "num_experts_per_tok", 0)),
        longest=int(getattr(text, "max_position_embeddings", 1 << 30)),
        nbytes=4 * parameters,
    )


class TransformersModel:
    """A balanced transformers model for the engine; its outputs are tokens. Collective.

    bytes_per_token: bytes of text that are enough for one token.
    """

    def __init__(
        self, folder: str | None, group: ProcessGroup, seed: int, *, slots: int, **balancing: Any
    ) -> None:
        from ultraep.integrations.transformers import (
            balance,
            balanced_experts,
            balanced_from_pretrained,
            balancers,
        )

        wait_until_compiled()
        config = config_of(folder)
        if folder is None:
            torch.manual_seed(seed)  # the same weights on all ranks
            self.model: Any = transformers().Qwen3MoeForCausalLM(config)
            balance(self.model, group, slots=slots, policy="none", **balancing)
            self._encode: Encode | None = None  # tokens are bytes
            self.bytes_per_token = 1
        else:
            self.model = balanced_from_pretrained(
                folder, group, slots=slots, policy="none", balancing=balancing
            )
            words = hashed_words(config.get_text_config().vocab_size)
            self._encode = tokenizer_of(Path(folder)) or words
            self.bytes_per_token = BYTES_PER_TOKEN
        self.model.eval()
        self.balancers: list[Balancer] = balancers(self.model)
        even = {id(b): EvenChoices(b.topology, group.rank()) for b in self.balancers}
        self.even_choices = list(even.values())
        for module in balanced_experts(self.model).values():
            module.register_forward_pre_hook(even[id(module.balancer)], with_kwargs=True)

    def encode(self, prompt: Prompt) -> torch.Tensor:
        """[T] token ids, at most `prompt.tokens`."""
        text = prompt.text.decode("utf-8", "replace")
        ids = self._encode(text) if self._encode else list(text.encode())
        return torch.tensor(ids[: prompt.tokens], dtype=torch.int64)

    def first_outputs(self, texts: Sequence[torch.Tensor]) -> list[int]:
        """[n] the first new token of every text."""
        return self.last_logits(texts).argmax(dim=-1).tolist()[: len(texts)]

    @torch.no_grad()
    def last_logits(self, texts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[n, V] logits after every text; the texts are packed into one sequence.

        A rank without texts runs one token, because attention needs at least one.
        """
        texts = texts or [torch.zeros(1, dtype=torch.int64)]
        positions = torch.cat([torch.arange(len(text)) for text in texts])
        ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
        inputs = {"input_ids": torch.cat(list(texts))[None], "position_ids": positions[None]}
        logits: torch.Tensor = self.model(**inputs, use_cache=False, logits_to_keep=ends).logits[0]
        return logits

    def check_packing(self) -> None:
        """Raise if packed texts attend to each other in this model; collective."""
        before, text = torch.arange(3, 12), torch.arange(20, 25)
        alone, packed = self.last_logits([text])[0], self.last_logits([before, text])[1]
        difference = ((alone - packed).abs().max() / alone.abs().max()).item()
        if not difference <= PACKING_TOLERANCE:
            raise ConfigError(
                f"{type(self.model).__name__} cannot be served: packed prompts attend to each "
                f"other (their logits differ by {difference:.2g}, the limit is {PACKING_TOLERANCE})"
            )


# -- calibration ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibrated:
    """Measured speeds of the engine, and the settings chosen from them.

    budget: max tokens per rank in a microbatch.   min_tokens: min rows of a replica.
    """

    budget: int
    min_tokens: int
    row_seconds: float  # CPU time per row in an expert, mean over ranks
    copy_seconds: float  # per replica sent, on the slowest rank
    tokens_per_second: float  # all ranks, without balancing, at full load
    rates: tuple[float, ...]  # prompts per second to test


def calibrate(engine: Engine, options: EngineOptions, bytes_per_token: int) -> Calibrated:
    """Measure the engine and choose its budget and min_tokens; collective."""

    def trial(variant: str) -> float:
        """Serve some full microbatches of prompts that arrive at once; tokens per second."""
        tokens = FULL * engine.ranks * engine.budget
        count = max(engine.ranks, round(tokens / lengths.mean))
        seed = [options.load.seed, TRIAL_ROUND]
        prompts = make_prompts([Arrival(0.0)] * count, lengths, seed, bytes_per_token)
        for balancer in engine.model.balancers:
            balancer.reset_stats()
        turn = engine.serve(prompts, variant, math.inf, TRIAL_ROUND)
        return sum(turn.tokens) / turn.seconds

    lengths = options.load.lengths
    engine.budget = options.budget or engine.budget
    trial("none")  # warms up
    trial("ultraep")
    if options.budget is None:
        speed = max(trial("none") for _ in range(TRIALS))
        tokens = STEP * round(MICROBATCH_SECONDS * speed / engine.ranks / STEP)
        engine.budget = from_first(min(LARGEST, max(SMALLEST, tokens)))
    speeds, row_costs, copy_costs = [], [], []
    for _ in range(TRIALS):
        speeds.append(trial("none"))
        row_costs.append(_by_rank(sum(engine.sums.busy) / max(1, engine.sums.rows)).mean().item())
        engine.routing = "own"  # even routing makes no replicas, so their cost would not show
        trial("ultraep")
        engine.routing = options.routing
        stats = [balancer.stats() for balancer in engine.model.balancers]
        copies = _by_rank(sum(own["weights_copies_sent"] for own in stats)).max().item()
        seconds = _by_rank(sum(own["seconds"]["replicate"] for own in stats)).max().item()
        copy_costs.append(seconds / copies if copies else 0.0)
    row, copy, fastest = min(row_costs), min(copy_costs), from_first(max(speeds))
    engine.min_tokens = max(1, math.ceil(PAYS * copy / row)) if row else 1
    return Calibrated(
        budget=engine.budget,
        min_tokens=engine.min_tokens,
        row_seconds=row,
        copy_seconds=copy,
        tokens_per_second=fastest,
        rates=options.load.known_rates() or rates_of(options.load, fastest),
    )


def rates_of(load: LoadOptions, tokens_per_second: float) -> tuple[float, ...]:
    """Prompts per second for every share of the throughput, to two digits."""
    most = tokens_per_second / load.lengths.mean
    return tuple(dict.fromkeys(float(f"{share * most:.2g}") for share in load.shares))


def _by_rank(value: float) -> torch.Tensor:
    """[R] the value of every rank; collective."""
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values
