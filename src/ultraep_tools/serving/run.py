"""The load test of the engine: a transformers model on ranks of this machine, all turns.

The model is a checkpoint, or random, small and dominated by its experts. Before the first turn, a
calibration of some seconds chooses the size of microbatches and the rates to test.

Shapes: n prompts, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ultraep.backends import wait_until_compiled
from ultraep.config import check_choice
from ultraep.errors import ConfigError, NothingToBalance
from ultraep.runtime.balancer import Balancer
from ultraep_tools.inspect.checkpoint import read_config
from ultraep_tools.inspect.library import transformers
from ultraep_tools.inspect.texts import Encode, hashed_words, tokenizer_of
from ultraep_tools.launch.group import BACKENDS, gpus, process_group, settle
from ultraep_tools.launch.processes import RankPlace, run_ranks
from ultraep_tools.report.rows import cpu_device
from ultraep_tools.serving.engine import (
    Engine,
    EvenTurns,
    ForcedChoices,
    check_variants,
    from_first,
)
from ultraep_tools.serving.load import Arrival, LoadOptions, Prompt, make_prompts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
PACKING_TOLERANCE = {4: 1e-3, 2: 0.1}  # of a prompt's logits alone and in a pack, by itemsize
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # of the random model
ROUTINGS = ("own", "even")
MOST_RANKS = 64
MICROBATCH_SECONDS = 0.5  # duration of a full microbatch, for the calibrated budget
SMALLEST, LARGEST, STEP = 32, 4096, 16  # range of the calibrated budget, in tokens
FULL, TRIALS = 4, 3  # microbatches per trial, and trials; the fastest trial counts
TRIAL_ROUND = 1 << 20  # seeds the prompts of trials; rounds have smaller numbers

Report = Callable[[Any], None]  # called with `Calibrated`, then with every `Turn`


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the engine.

    model: directory of a checkpoint; None: random.   variants: policies to compare.
    device: "cpu" or "cuda"; ranks share GPUs if there are fewer GPUs than ranks.
    budget: max tokens per rank in a microbatch; None: calibrated.
    routing: "own" (the model's router) or "even" for all variants.
    """

    load: LoadOptions
    variants: tuple[str, ...] = ("none", "ultraep", "even")
    ranks: int = 2
    slots: int = 2
    model: str | None = None
    budget: int | None = None
    routing: str = "own"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ConfigError(f"--ranks must lie between 1 and {MOST_RANKS}, got {self.ranks}")
        if self.slots < 0:
            raise ConfigError(f"--slots must not be negative, got {self.slots}")
        if self.budget is not None and self.budget < 1:
            raise ConfigError(f"--budget must be at least 1, got {self.budget}")
        check_choice("--routing", self.routing, ROUTINGS)
        check_choice("--device", self.device, tuple(BACKENDS))


def check(options: EngineOptions) -> ModelFacts:
    """Return facts about the model; raise if it cannot be served or prompts are too long."""
    check_variants(options.variants)
    if options.device == "cuda":
        gpus()
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
    run_ranks("ultraep_tools.serving.run:work", options, options.ranks, report)


def work(place: RankPlace, options: EngineOptions, report: Report) -> None:
    """Run one rank; only rank 0 reports."""
    device, backend = settle(place, options.device, shared=True), options.device
    if device.type == "cuda" and place.size > gpus():
        backend = "cpu"  # NCCL refuses two ranks on one GPU
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would prepare a plan for every length
    report = report if place.rank == 0 else lambda _: None
    with process_group(place, backend), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch uses a slower kernel
        # A group of its own, apart from the messages of the engine.
        model = load_model(options, dist.new_group(), device)
        model.check_packing()
        engine = Engine(model, routing=options.routing)
        calibrated = calibrate(engine, options, model.bytes_per_token)
        report(calibrated)
        for variant, rate, number in options.load.turns(options.variants, calibrated.rates):
            prompts = options.load.prompts(rate, number, model.bytes_per_token)
            report(engine.serve(prompts, variant, rate, number))
        model.close()


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


def config_of(folder: str | None) -> Any:
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
    )


def random_model(config: Any, seed: int, device: torch.device) -> Any:
    """Draw a Qwen3-MoE on the device; the same seed gives the same weights on all ranks."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[device.type])
    try:
        with device:
            return transformers().Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def load_model(
    options: EngineOptions, group: ProcessGroup, device: torch.device
) -> TransformersModel:
    """Load the checkpoint, or draw the random model, and balance it. Collective."""
    from ultraep.integrations.transformers import balance, balanced_from_pretrained

    wait_until_compiled()
    config, folder = config_of(options.model), options.model
    common: dict[str, Any] = {"slots": options.slots, "policy": "none"}
    if folder is None:
        model = random_model(config, options.load.seed, device)
        balance(model, group, **common)
        return TransformersModel(model)
    model = balanced_from_pretrained(folder, group, **common)
    encode = tokenizer_of(Path(folder)) or hashed_words(config.get_text_config().vocab_size)
    return TransformersModel(model.to(device), encode, BYTES_PER_TOKEN)


class TransformersModel:
    """A transformers model for the engine; its outputs are tokens.

    model: unmodified, or balanced with the policy "none".
    encode: the tokenizer; None: tokens are bytes.
    bytes_per_token: bytes of text that are enough for one token.
    """

    def __init__(self, model: Any, encode: Encode | None = None, bytes_per_token: int = 1) -> None:
        from ultraep.integrations.transformers import balanced_experts

        self.model = model.eval().requires_grad_(False)  # so that rates exclude gradients
        self.device = next(model.parameters()).device
        self._encode, self.bytes_per_token = encode, bytes_per_token
        self._modules = list(balanced_experts(model).values())
        self._balancers = {"none": [module.balancer for module in self._modules]}
        self.even_choices = []
        for module in self._modules:
            even = EvenTurns(module.balancer.topology, module.balancer.rank)
            self.even_choices.append(ForcedChoices(even.chosen))
            module.register_forward_pre_hook(self.even_choices[-1], with_kwargs=True)

    def use(self, policy: str) -> list[Balancer]:
        """Plan by this policy from now on; return the balancers. Collective.

        Every policy has its own balancers: a GPU plans by the first policy of its balancer only.
        """
        if policy not in self._balancers:
            first = self._balancers["none"]
            new = {balancer: with_policy(balancer, policy) for balancer in dict.fromkeys(first)}
            for balancer in first:
                new[balancer].register_layer()
            self._balancers[policy] = [new[balancer] for balancer in first]
        for module, balancer in zip(self._modules, self._balancers[policy], strict=True):
            module.balancer = balancer
        return list(dict.fromkeys(self._balancers[policy]))

    def close(self) -> None:
        for policy in self._balancers:
            for balancer in self.use(policy):
                balancer.close()

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
        ids, positions = torch.cat(list(texts)), torch.cat([torch.arange(len(t)) for t in texts])
        ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
        ids, positions, ends = (tensor.to(self.device) for tensor in (ids, positions, ends))
        logits: torch.Tensor = self.model(
            ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=ends
        ).logits[0]
        return logits

    def check_packing(self) -> None:
        """Raise if packed texts attend to each other in this model; collective."""
        before, text = torch.arange(3, 12), torch.arange(20, 25)
        alone, packed = self.last_logits([text])[0], self.last_logits([before, text])[1]
        difference = ((alone - packed).abs().max() / alone.abs().max()).item()
        limit = PACKING_TOLERANCE[alone.itemsize]
        if not difference <= limit:
            raise ConfigError(
                f"{type(self.model).__name__} cannot be served: packed prompts attend to each "
                f"other (their logits differ by {difference:.2g}, the limit is {limit})"
            )


def with_policy(balancer: Balancer, policy: str) -> Balancer:
    """Return a new balancer with this policy and the settings of another one. Collective."""
    topology, settings = balancer.topology, balancer.settings
    options = {field.name: getattr(settings, field.name) for field in fields(settings)}
    options |= {"experts": topology.homes or topology.experts, "slots": topology.slots}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingToBalance)  # of one rank, or without slots
        return Balancer._with_settings(balancer.group, policy=policy, **options)


# -- calibration ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibrated:
    """The measured speed of the engine, and the settings chosen from it.

    budget: max tokens per rank in a microbatch.   device: the name of the CPU or GPU.
    """

    budget: int
    tokens_per_second: float  # all ranks, without balancing, at full load
    rates: tuple[float, ...]  # prompts per second to test
    device: str


def calibrate(engine: Engine, options: EngineOptions, bytes_per_token: int) -> Calibrated:
    """Warm up all variants, measure the engine and choose its budget; collective."""

    def trial(variant: str) -> float:
        """Serve some full microbatches of prompts that arrive at once; tokens per second."""
        tokens = FULL * engine.ranks * engine.budget
        count = max(engine.ranks, round(tokens / lengths.mean))
        seed = [options.load.seed, TRIAL_ROUND]
        prompts = make_prompts([Arrival(0.0)] * count, lengths, seed, bytes_per_token)
        turn = engine.serve(prompts, variant, math.inf, TRIAL_ROUND)
        return sum(turn.tokens) / turn.seconds

    def fastest() -> float:
        """Warm up all variants; return the tokens per second without balancing."""
        for variant in dict.fromkeys(("none", *options.variants)):
            trial(variant)
        return float(from_first(max(trial("none") for _ in range(TRIALS))))

    lengths = options.load.lengths
    engine.budget = options.budget or engine.budget
    speed = fastest()
    if options.budget is None:
        tokens = STEP * round(MICROBATCH_SECONDS * speed / engine.ranks / STEP)
        engine.budget = min(LARGEST, max(SMALLEST, tokens))
        speed = fastest()
    rates = options.load.known_rates() or rates_of(options.load, speed)
    device = engine.model.device
    name = cpu_device() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return Calibrated(engine.budget, speed, rates, name)


def rates_of(load: LoadOptions, tokens_per_second: float) -> tuple[float, ...]:
    """Prompts per second for every share of the throughput, to two digits."""
    most = tokens_per_second / load.lengths.mean
    return tuple(dict.fromkeys(float(f"{share * most:.2g}") for share in load.shares))
