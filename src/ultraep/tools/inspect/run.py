"""Inspection: a model and texts that belong together, checked; then the routing, recorded.

OUT/
|-- trace/              every window of every layer, for `ultraep trace` and `ultraep advise`
|-- result.json         an `InspectionResult`
|-- model.toml          the model's sizes, for the simulator
|-- report.html         made of them
`-- .ultraep-inspection what of this an inspection made, and whether one runs
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ultraep.errors import ConfigError, FileError
from ultraep.tools.inspect.anatomy import Anatomy
from ultraep.tools.inspect.asked import Asked
from ultraep.tools.inspect.catch import Catcher, topology_of
from ultraep.tools.inspect.checkpoint import Checkpoint, weight_files
from ultraep.tools.inspect.estimate import IN_BETWEEN, LIBRARIES, Estimate, Work, bytes_per_second
from ultraep.tools.inspect.families import RandomModel
from ultraep.tools.inspect.findings import Findings, find
from ultraep.tools.inspect.library import Understood
from ultraep.tools.inspect.result import FILES, TRACE, TextSpan, spans
from ultraep.tools.inspect.texts import Excerpt, excerpts, hashed_words, texts_of, tokenizer_of
from ultraep.tools.inspect.windows import run_windows
from ultraep.tools.outputs import OutputDir
from ultraep.topology import Topology
from ultraep.trace.read import read_trace

USUAL_SIZES = (8, 16, 64)
CHOICES = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts")
USUAL_CHOICES = 8  # of a token, where the configuration has another name for it

Tell = Callable[[int, int, str], None]


class Inspection:
    """A model that was opened without its weights, and the texts for it. A context, as it is."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.notes = asked, list[str]()
        self.opened = _open(asked)
        whole = self.opened.anatomy
        self.anatomy = whole.only(_chosen(whole, asked.layers))
        experts = topology_of(self.anatomy, slots=0, sizes=[]).experts
        self.sizes = _sizes(asked.sizes, experts)
        self.topology = _topology(self.anatomy, asked.slots, self.sizes)
        self.excerpts = self._excerpts()
        if asked.family is not None:
            self.notes.append("weights are random: how uneven a real model is, only that can tell")
        self.blocks = self._blocks()

    def __enter__(self) -> Inspection:
        self.opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.opened.__exit__(*error)

    @property
    def texts(self) -> list[TextSpan]:
        """The texts, by windows."""
        return spans(self.excerpts)

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
            Understood(self.asked.model or Path(self.asked.name), "transformers cannot run it"),
        ):
            run_windows(self.anatomy, windows, self.opened.lend, going, self.blocks[-1])
        return catcher

    def findings(self, claim: OutputDir, tell: Tell) -> Findings:
        """The recorded trace, planned as asked for."""
        asked = self.asked
        return find(
            read_trace(claim.traces[0]),
            self.texts,
            sizes=self.sizes,
            slots=asked.slots,
            policies=asked.policies,
            history=asked.history,
            tell=tell,
        )

    @cached_property
    def estimate(self) -> Estimate:
        """Sizes and time; measures how fast this machine is, for a moment."""
        opened, windows = self.opened, self.texts[-1].end + 1
        tokens = sum(excerpt.tokens for excerpt in self.excerpts)
        work = Work(
            blocks=[self.anatomy.blocks[name] for name in self.blocks],
            experts=list(self.anatomy.experts.values()),
            share=self.choices / self.topology.experts,
            tokens=tokens,
            windows=windows,
            cases=len(self.sizes) * len(self.asked.slots) * len(self.asked.policies),
        )
        width = opened.config.get_text_config().hidden_size * opened.dtype.itemsize
        on_their_way = tokens + IN_BETWEEN * self.choices * (tokens // windows)
        return Estimate(
            parameters=sum(p.numel() for p in opened.model.parameters()),
            active=work.active,
            read=opened.bytes_to_read(self.blocks),
            memory=LIBRARIES + opened.bytes_in_memory() + width * on_their_way,
            tokens=tokens,
            seconds=work.seconds(opened.device, opened.dtype) + self._reading(),
        )

    def _reading(self) -> float:
        """Seconds for the files."""
        read = self.opened.bytes_to_read(self.blocks)
        if not read or self.asked.model is None:
            return 0.0
        return float(read / bytes_per_second(weight_files(self.asked.model)[0]))

    @property
    def choices(self) -> int:
        """Experts that a token chooses, as the configuration says."""
        config = self.opened.config.get_text_config()
        found = next((getattr(config, name) for name in CHOICES if hasattr(config, name)), None)
        return min(found or USUAL_CHOICES, self.topology.experts)

    def _excerpts(self) -> list[Excerpt]:
        asked, config = self.asked, self.opened.config.get_text_config()
        encode = tokenizer_of(asked.model) if asked.model else None
        if encode is None:
            self.notes.append("no tokenizer is there: a token is a word, by a hash of it")
        longest = getattr(config, "max_position_embeddings", None) or asked.sequence
        if longest < 1:
            raise FileError(
                f"{asked.name}: max_position_embeddings must be positive, got {longest}"
            )
        return excerpts(
            texts_of(asked.files, asked.tokens),
            encode or hashed_words(config.vocab_size),
            tokens=asked.tokens,
            window=asked.window,
            sequence=min(asked.sequence, longest),
        )

    def _blocks(self) -> list[str]:
        """Names of the blocks that are run: up to the last one that is looked at."""
        names, wanted = list(self.anatomy.blocks), set(self.anatomy.block_of_layer.values())
        return names[: max(names.index(name) for name in wanted) + 1]

    def _note(self) -> str:
        told = ", ".join(f"{span.name} {span.begin} to {span.end}" for span in self.texts)
        return f"ultraep inspect {self.asked.name}; steps are windows of text: {told}"


def claim_folder(out: Path) -> OutputDir:
    """The folder for all that an inspection makes."""
    return OutputDir(out, work="inspection", files=FILES, traces=[TRACE])


# -- what is asked for ---------------------------------------------------------------------------


def _open(asked: Asked) -> Any:
    device = _device(asked.device)
    dtype = getattr(torch, asked.dtype) if asked.dtype else None
    if asked.family is not None:
        return RandomModel(asked.family, device=device, dtype=dtype, seed=asked.seed)
    assert asked.model is not None
    if dtype is None and device.type == "cpu":
        dtype = torch.float32  # what most processors multiply fastest
    return Checkpoint(asked.model, device=device, dtype=dtype)


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
    known = list(anatomy.experts)
    unknown = next((layer for layer in layers or () if layer not in known), None)
    if unknown is not None:
        told = ", ".join(map(str, known))
        raise ConfigError(f"--layers {unknown}: layers with experts are {told}")
    return known if layers is None else sorted(set(layers))


def _sizes(asked: tuple[int, ...] | None, experts: int) -> list[int]:
    if asked is None:
        fitting = [size for size in USUAL_SIZES if size <= experts]
        return fitting or [1 << (experts.bit_length() - 1)]
    for size in asked:
        if not 1 <= size <= experts:
            raise ConfigError(
                f"--ep {size}: ranks must be at least 1 and no more than the {experts} experts"
            )
    return list(dict.fromkeys(asked))


def _topology(anatomy: Anatomy, slots: tuple[int, ...], sizes: list[int]) -> Topology:
    """The topology of the trace; what is asked for is checked on the way."""
    made = [topology_of(anatomy, slots=count, sizes=sizes) for count in slots]
    return made[0]
