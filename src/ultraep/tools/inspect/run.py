"""Inspection: a model and texts that belong together, checked; then the routing, recorded.

OUT/
|-- trace/              every window of every layer, for `ultraep trace` and `ultraep advise`
|-- result.json         an `InspectionResult`
|-- model.toml          the model's sizes, for the simulator
|-- report.html         made of them
`-- .ultraep-inspection what of this an inspection made, and whether one runs
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ultraep import __version__
from ultraep.errors import ConfigError, FileError
from ultraep.tools.inspect.anatomy import Anatomy, num_experts
from ultraep.tools.inspect.checkpoint import Checkpoint, weight_files
from ultraep.tools.inspect.families import RandomModel
from ultraep.tools.inspect.findings import (
    PRESET_FILE,
    REPORT_FILE,
    RESULT_FILE,
    TRACE,
    Findings,
    InspectionResult,
    TextSpan,
    find,
)
from ultraep.tools.inspect.library import Understood
from ultraep.tools.inspect.options import InspectOptions
from ultraep.tools.inspect.texts import Excerpt, excerpts, hashed_words, texts_of, tokenizer_of
from ultraep.tools.inspect.windows import Catcher, run_windows
from ultraep.tools.outputs import OutputDir
from ultraep.topology import Topology
from ultraep.trace.read import read_trace

USUAL_SIZES = (8, 16, 64)
CHOICES = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts")
USUAL_CHOICES = 8  # of a token, where the configuration has another name for it
REACHED = 0.25  # of the speed of a large product, by the many smaller products of a model
FIRST = 4.0  # seconds of first calls, which import and compile
CALL = 0.02  # seconds of a block besides its products, for every window
PLAN = 0.0006  # seconds of a plan
ACTIVATIONS = 12  # tensors of a window, as wide as the model, that a block holds at one time
LIBRARIES = 500_000_000  # bytes of torch and transformers themselves
SIDE = 768  # of the matrices whose product is timed
SAMPLE = 16 << 20  # bytes that are read to measure the speed of reading

Tell = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Estimate:
    """Sizes and time of an inspection before it starts."""

    parameters: int
    active: int  # per token
    read: int  # bytes of files
    memory: int  # bytes at one time, weights and activations
    tokens: int
    seconds: float


class Inspection:
    """A model that was opened without its weights, and the texts for it. A context, as it is."""

    def __init__(self, options: InspectOptions) -> None:
        self.options, self.notes = options, list[str]()
        self.opened = _open(options)
        whole = self.opened.anatomy
        self.anatomy = whole.only(_chosen(whole, options.layers))
        experts = topology_of(self.anatomy, slots=0, sizes=[]).experts
        self.sizes = _sizes(options.sizes, experts)
        self.topology = _topology(self.anatomy, options.slots, self.sizes)
        self.excerpts = self._excerpts()
        if options.family is not None:
            self.notes.append("weights are random: a real model has another imbalance")
        self.blocks = self._blocks()

    def __enter__(self) -> Inspection:
        self.opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.opened.__exit__(*error)

    @property
    def texts(self) -> list[TextSpan]:
        """The windows of every text in the trace."""
        spans: list[TextSpan] = []
        for excerpt in self.excerpts:
            begin = spans[-1].end + 1 if spans else 0
            end = begin + len(excerpt.windows) - 1
            spans.append(TextSpan(excerpt.name, begin, end, excerpt.tokens))
        return spans

    def record(self, claim: OutputDir, tell: Tell) -> Catcher:
        """Send all windows through the model; what its routers decide is in the trace then.

        tell: hears what was done, of how much, and what comes. On interruption the trace is
        complete as far as it goes.
        """
        catcher = Catcher(claim.traces[0], self.anatomy, self.topology, note=self._note())
        windows = [
            torch.from_numpy(window).to(self.opened.device)
            for excerpt in self.excerpts
            for window in excerpt.windows
        ]
        names = [span.name for span in self.texts for _ in range(span.begin, span.end + 1)]

        def going(block: str, number: int) -> None:
            catcher.window = number
            place = self.blocks.index(block)
            words = f"layer {place} of {len(self.anatomy.blocks)}, {names[number]}"
            tell(place * len(windows) + number, len(self.blocks) * len(windows), words)

        with (
            catcher.listening(),
            Understood(self.options.model or Path(self.options.name), "transformers cannot run it"),
        ):
            run_windows(self.anatomy, windows, self.opened.lend, going, self.blocks[-1])
        return catcher

    def findings(self, claim: OutputDir, tell: Tell) -> Findings:
        """The recorded trace, planned under all policies."""
        options = self.options
        return find(
            read_trace(claim.traces[0]),
            self.texts,
            sizes=self.sizes,
            slots=options.slots,
            policies=options.policies,
            history=options.history,
            tell=tell,
        )

    def result(self, caught: Catcher, findings: Findings, seconds: float) -> InspectionResult:
        """Facts about the model and the run, and a row for every case."""
        opened, notes = self.opened, list(self.notes)
        if caught.dropped:
            notes.append(f"{caught.dropped} records were dropped: the disk was too slow")
        return InspectionResult(
            version=__version__,
            model=self.options.name,
            family=opened.config.model_type,
            random=self.options.family is not None,
            parameters=self.estimate.parameters,
            active=self.estimate.active,
            blocks=len(opened.anatomy.blocks),
            layers=findings.trace.layers.tolist(),
            experts=self.topology.experts,
            top_k=caught.top_k,
            dtype=str(opened.dtype).removeprefix("torch."),
            device=str(opened.device),
            texts=self.texts,
            window=max(window.size for excerpt in self.excerpts for window in excerpt.windows),
            sequence=self.excerpts[0].windows[0].shape[1],
            wall_seconds=seconds,
            notes=notes,
            rows=findings.rows,
        )

    @cached_property
    def estimate(self) -> Estimate:
        """Sizes and time; measures for a moment how fast this machine is."""
        opened, windows = self.opened, self.texts[-1].end + 1
        tokens = sum(excerpt.tokens for excerpt in self.excerpts)
        in_experts = sum(map(_weights, self.anatomy.experts.values()))
        in_blocks = sum(_weights(self.anatomy.blocks[name]) for name in self.blocks)
        share = self.choices / self.topology.experts
        active = in_blocks - in_experts + round(in_experts * share)
        cases = len(self.sizes) * len(self.options.slots) * len(self.options.policies)
        speed = REACHED * operations_per_second(opened.device, opened.dtype)
        seconds = FIRST + 2 * active * tokens / speed + len(self.blocks) * windows * CALL
        seconds += len(self.anatomy.experts) * windows * cases * PLAN
        read = opened.bytes_to_read(self.blocks)
        if read and self.options.model is not None:
            seconds += read / bytes_per_second(weight_files(self.options.model)[0])
        width = opened.config.get_text_config().hidden_size * opened.dtype.itemsize
        activations = tokens + ACTIVATIONS * self.choices * (tokens // windows)
        return Estimate(
            parameters=_weights(opened.model),
            active=active,
            read=read,
            memory=LIBRARIES + opened.bytes_in_memory() + width * activations,
            tokens=tokens,
            seconds=seconds,
        )

    @property
    def choices(self) -> int:
        """Experts that a token chooses, as the configuration says."""
        config = self.opened.config.get_text_config()
        choices = next((getattr(config, name) for name in CHOICES if hasattr(config, name)), None)
        return min(choices or USUAL_CHOICES, self.topology.experts)

    def _excerpts(self) -> list[Excerpt]:
        options, config = self.options, self.opened.config.get_text_config()
        encode = tokenizer_of(options.model) if options.model else None
        if encode is None:
            self.notes.append("no tokenizer: every word is a token, by its hash")
        longest = getattr(config, "max_position_embeddings", None) or options.sequence
        if longest < 1:
            raise FileError(
                f"{options.name}: max_position_embeddings must be positive, got {longest}"
            )
        return excerpts(
            texts_of(options.files, options.tokens),
            encode or hashed_words(config.vocab_size),
            tokens=options.tokens,
            window=options.window,
            sequence=min(options.sequence, longest),
        )

    def _blocks(self) -> list[str]:
        """Names of the blocks that are run: up to the last one that is recorded."""
        names, wanted = list(self.anatomy.blocks), set(self.anatomy.block_of_layer.values())
        return names[: max(names.index(name) for name in wanted) + 1]

    def _note(self) -> str:
        texts = ", ".join(f"{span.name} {span.begin} to {span.end}" for span in self.texts)
        return f"ultraep inspect {self.options.name}; steps are windows of text: {texts}"


def claim_folder(out: Path) -> OutputDir:
    """The folder for all that an inspection makes."""
    files = (RESULT_FILE, REPORT_FILE, PRESET_FILE)
    return OutputDir(out, work="inspection", files=files, traces=[TRACE])


# -- options -------------------------------------------------------------------------------------


def _open(options: InspectOptions) -> Any:
    device = _device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.family is not None:
        return RandomModel(options.family, device=device, dtype=dtype, seed=options.seed)
    assert options.model is not None
    if dtype is None and device.type == "cpu":
        dtype = torch.float32  # what most processors multiply fastest
    return Checkpoint(options.model, device=device, dtype=dtype)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device is cpu, cuda or cuda:0, got {name!r}") from None
    count = torch.cuda.device_count()
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device is cpu, cuda or cuda:0, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"--device {name}: this machine has {count} GPUs that torch can use")
    return device


def _chosen(anatomy: Anatomy, layers: tuple[int, ...] | None) -> list[int]:
    with_experts = list(anatomy.experts)
    unknown = next((layer for layer in layers or () if layer not in with_experts), None)
    if unknown is not None:
        names = ", ".join(map(str, with_experts))
        raise ConfigError(f"--layers {unknown}: layers with experts are {names}")
    return with_experts if layers is None else sorted(set(layers))


def _sizes(sizes: tuple[int, ...] | None, experts: int) -> list[int]:
    if sizes is None:
        fitting = [size for size in USUAL_SIZES if size <= experts]
        return fitting or [1 << (experts.bit_length() - 1)]
    for size in sizes:
        if not 1 <= size <= experts:
            raise ConfigError(
                f"--ep {size}: ranks must be at least 1 and no more than the {experts} experts"
            )
    return list(dict.fromkeys(sizes))


def _topology(anatomy: Anatomy, slots: tuple[int, ...], sizes: list[int]) -> Topology:
    """The topology of the trace; all numbers of slots are checked."""
    topologies = [topology_of(anatomy, slots=count, sizes=sizes) for count in slots]
    return topologies[0]


def topology_of(anatomy: Anatomy, *, slots: int, sizes: list[int]) -> Topology:
    """One rank with all experts, which can be regrouped into so many ranks later."""
    counts = {layer: num_experts(experts) for layer, experts in anatomy.experts.items()}
    experts = next(iter(counts.values()))
    other = next((layer for layer, count in counts.items() if count != experts), None)
    if other is not None:
        first = next(iter(counts))
        raise ConfigError(
            f"layer {first} has {experts} experts, layer {other} has {counts[other]}: a trace is "
            "one of layers with the same number, choose them with --layers"
        )
    uneven = any(experts % size for size in sizes)
    return Topology(ranks=1, experts=experts, slots=slots, homes=[0] * experts if uneven else None)


def _weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# -- speeds of this machine ----------------------------------------------------------------------


def operations_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Speed of products of two large matrices, the best of three."""
    matrix = torch.ones(SIDE, SIDE, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2 * SIDE**3 / best


def bytes_per_second(file: Path) -> float:
    """Speed of reading, in the middle of a file."""
    with file.open("rb") as content:
        content.seek(max(0, file.stat().st_size - SAMPLE) // 2)
        begin = time.perf_counter()
        count = len(content.read(SAMPLE))
    return max(count, 1) / max(time.perf_counter() - begin, 1e-6)
