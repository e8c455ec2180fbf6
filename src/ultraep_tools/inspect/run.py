"""Inspection: check a model and its texts, estimate the work, record the routing.

OUT/
|-- trace/              all windows of all layers, for `ultraep trace` and `ultraep advise`
|-- result.json         an `InspectionResult`
|-- model.toml          the sizes of the model, for the simulator
|-- report.html         plots of the findings
`-- .ultraep-inspection marker: which of these files an inspection wrote
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ultraep import __version__
from ultraep.arrays import IntArray
from ultraep.errors import ConfigError, FileError
from ultraep.files.writing import write_text
from ultraep.topology import Topology
from ultraep.trace.read import read_trace
from ultraep_tools.inspect.blocks import Anatomy, RoutingRecorder, num_experts, run_windows
from ultraep_tools.inspect.checkpoint import Checkpoint, RandomModel
from ultraep_tools.inspect.findings import (
    PRESET_FILE,
    TRACE,
    Findings,
    InspectionResult,
    Progress,
    find,
    row_of,
)
from ultraep_tools.inspect.library import LibraryErrors
from ultraep_tools.inspect.options import InspectOptions
from ultraep_tools.inspect.texts import TextSpan, hashed_words, texts_of, tokenizer_of, windows_of
from ultraep_tools.outputs import OutputDir
from ultraep_tools.report.page import REPORT_FILE, RESULT_FILE
from ultraep_tools.sim.model import GATED

USUAL_SIZES = (8, 16, 64)
TOP_K_NAMES = ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts")
USUAL_TOP_K = 8  # if the configuration has another name for it
# For the estimate of the memory:
ACTIVATIONS = 12  # hidden-size tensors of a window that a block holds at once
LIBRARIES = 500_000_000  # bytes of torch and transformers


@dataclass(frozen=True)
class Estimate:
    """The work of an inspection, before it reads any weights."""

    parameters: int
    active: int  # per token
    read: int  # bytes of files
    memory: int  # peak bytes
    tokens: int


class Inspection:
    """A model opened without its weights, and the texts for it."""

    def __init__(self, options: InspectOptions) -> None:
        self.options, self.notes = options, list[str]()
        self.opened = _open(options)
        anatomy = self.opened.anatomy
        self.anatomy = anatomy.only(_layers(anatomy, options.recorded_layers))
        experts = experts_per_layer(self.anatomy)
        self.sizes = _sizes(options.sizes, experts)
        uneven = any(experts % size for size in self.sizes)
        homes = [0] * experts if uneven else None
        self.topology, *_ = [  # of the trace; the other topologies are only checked
            Topology(ranks=1, experts=experts, slots=slots, homes=homes)
            for slots in options.slot_counts
        ]
        self.texts, self.windows = self._windows()
        if options.random is not None:
            self.notes.append("weights are random: a trained model has another imbalance")
        blocks = list(anatomy.blocks)
        last = max(blocks.index(name) for name in self.anatomy.block_of_layer.values())
        self.blocks = blocks[: last + 1]  # that must run

    def _windows(self) -> tuple[list[TextSpan], list[IntArray]]:
        options, config = self.options, self.opened.config.get_text_config()
        encode = tokenizer_of(options.model) if options.model else None
        if encode is None:
            self.notes.append("no tokenizer: every word becomes a token by its hash")
        longest = getattr(config, "max_position_embeddings", None) or options.sequence_length
        if longest < 1:
            raise FileError(
                f"{options.name}: max_position_embeddings must be positive, got {longest}"
            )
        return windows_of(
            texts_of(options.text or [], options.tokens),
            encode or hashed_words(config.vocab_size),
            tokens=options.tokens,
            window=options.window,
            sequence=min(options.sequence_length, longest),
        )

    @cached_property
    def estimate(self) -> Estimate:
        opened, tokens = self.opened, sum(span.tokens for span in self.texts)
        in_experts = sum(map(_parameters, self.anatomy.experts.values()))
        in_blocks = sum(_parameters(self.anatomy.blocks[name]) for name in self.blocks)
        share = self.choices / self.topology.experts
        width = opened.config.get_text_config().hidden_size * opened.dtype.itemsize
        activations = tokens + ACTIVATIONS * self.choices * (tokens // len(self.windows))
        return Estimate(
            parameters=_parameters(opened.model),
            active=in_blocks - in_experts + round(in_experts * share),
            read=opened.bytes_to_read(self.blocks),
            memory=LIBRARIES + opened.bytes_in_memory() + width * activations,
            tokens=tokens,
        )

    @property
    def choices(self) -> int:
        """Experts per token, from the configuration."""
        config = self.opened.config.get_text_config()
        top_k = next((getattr(config, name) for name in TOP_K_NAMES if hasattr(config, name)), None)
        return min(top_k or USUAL_TOP_K, self.topology.experts)

    def record(self, out: OutputDir, report: Progress) -> RoutingRecorder:
        """Run all windows through the model and record the routing as a trace.

        After an interruption, the trace holds everything recorded so far.
        """
        spans = ", ".join(f"{span.name} {span.begin} to {span.end}" for span in self.texts)
        note = f"ultraep inspect {self.options.name}; steps are windows of text: {spans}"
        recorder = RoutingRecorder(out.traces[0], self.topology, note=note)
        count = len(self.windows)

        def before_block(block: str, window: int) -> None:
            recorder.window = window
            layer = self.blocks.index(block)
            text = next(span.name for span in self.texts if window <= span.end)
            words = f"layer {layer} of {len(self.anatomy.blocks)}, {text}"
            report(layer * count + window, len(self.blocks) * count, words)

        path = self.options.model or Path(self.options.name)
        with ExitStack() as stack:
            stack.enter_context(recorder)
            stack.enter_context(LibraryErrors(path, "transformers cannot run it"))
            for layer, experts in self.anatomy.experts.items():
                hook = partial(recorder.before_experts, layer)
                stack.enter_context(experts.register_forward_pre_hook(hook, with_kwargs=True))
            ids = [torch.from_numpy(window).to(self.opened.device) for window in self.windows]
            run_windows(self.anatomy, ids, self.opened.loaded, before_block, self.blocks[-1])
        return recorder

    def findings(self, out: OutputDir, report: Progress) -> Findings:
        return find(read_trace(out.traces[0]), self.texts, self.sizes, self.options, report)

    def result(
        self, recorder: RoutingRecorder, findings: Findings, seconds: float
    ) -> InspectionResult:
        opened, notes = self.opened, list(self.notes)
        if recorder.dropped:
            notes.append(f"{recorder.dropped} records were dropped because the disk was too slow")
        return InspectionResult(
            version=__version__,
            model=self.options.name,
            family=opened.config.model_type,
            random=self.options.random is not None,
            parameters=self.estimate.parameters,
            active=self.estimate.active,
            blocks=len(opened.anatomy.blocks),
            layers=findings.trace.layers.tolist(),
            experts=self.topology.experts,
            top_k=recorder.top_k,
            dtype=str(opened.dtype).removeprefix("torch."),
            device=str(opened.device),
            texts=self.texts,
            window=max(window.size for window in self.windows),
            sequence=self.windows[0].shape[1],
            wall_seconds=seconds,
            notes=notes,
            rows=[row_of(outcome) for outcome in findings.outcomes],
        )


def claim_folder(out: Path) -> OutputDir:
    files = (RESULT_FILE, REPORT_FILE, PRESET_FILE)
    return OutputDir(out, work="inspection", files=files, traces=[TRACE])


# -- options -------------------------------------------------------------------------------------


def _open(options: InspectOptions) -> Checkpoint | RandomModel:
    device = _device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.random is not None:
        return RandomModel(options.random, device=device, dtype=dtype, seed=options.seed)
    assert options.model is not None
    if dtype is None and device.type == "cpu":
        dtype = torch.float32  # the fastest dtype on most CPUs
    return Checkpoint(options.model, device=device, dtype=dtype)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device: torch.device | None = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"--device {name}, but torch finds {count} GPUs; use --device cpu")
    return device


def _layers(anatomy: Anatomy, layers: tuple[int, ...] | None) -> list[int]:
    for layer in layers or ():
        if layer not in anatomy.experts:
            names = ", ".join(map(str, anatomy.experts))
            raise ConfigError(f"--layers {layer}: layers with experts are {names}")
    return list(anatomy.experts if layers is None else layers)


def _sizes(sizes: tuple[int, ...] | None, experts: int) -> list[int]:
    if sizes is None:
        fitting = [size for size in USUAL_SIZES if size <= experts]
        return fitting or [1 << (experts.bit_length() - 1)]
    for size in sizes:
        if not 1 <= size <= experts:
            raise ConfigError(f"--ep {size}: ranks must lie between 1 and the {experts} experts")
    return list(sizes)


def experts_per_layer(anatomy: Anatomy) -> int:
    """Return the number of experts, which must be the same in all layers."""
    counts = {layer: num_experts(experts) for layer, experts in anatomy.experts.items()}
    first, experts = next(iter(counts.items()))
    for layer, count in counts.items():
        if count != experts:
            raise ConfigError(
                f"layer {first} has {experts} experts, layer {layer} has {count}; all layers of a "
                "trace must have the same number, select them with --layers"
            )
    return experts


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# -- sizes for the simulator ---------------------------------------------------------------------


def write_preset(path: Path, inspection: Inspection, top_k: int) -> None:
    """Write the sizes of the model as TOML, for `ultraep advise --model`."""
    opened, anatomy = inspection.opened, inspection.opened.anatomy
    config = opened.config.get_text_config()
    layer, experts = next(iter(inspection.anatomy.experts.items()))
    block = anatomy.blocks[anatomy.block_of_layer[layer]]
    width, count = config.hidden_size, inspection.topology.experts
    dense = set(anatomy.blocks) - set(anatomy.block_of_layer.values())
    table = {
        "title": inspection.options.name,
        "source": f"ultraep inspect, {type(opened.model).__name__}",
        "layers": len(anatomy.blocks),
        "dense_layers": len(dense),
        "width": width,
        "experts": count,
        "top_k": top_k,
        "expert_width": max(1, _parameters(experts) // (count * GATED * width)),
        "vocabulary": config.vocab_size,
        "shared_width": _shared_width(block, experts, width),
        "attention": _attention(config),
    }
    if dense:
        table["dense_width"] = int(getattr(config, "intermediate_size", 0) or 0)
    lines = [f"{name} = {_toml(value)}" for name, value in table.items()]
    write_text(path, "\n".join(["[inspected]", *lines]) + "\n")


def _shared_width(block: nn.Module, experts: nn.Module, width: int) -> int:
    """Parameters beside experts and router in their parent module, as the width of a gated MLP."""
    parent = next(m for m in block.modules() if any(child is experts for child in m.children()))
    count, own = num_experts(experts), set(experts.parameters())
    router = ((count, width), (count,))  # shapes
    shared = [p for p in parent.parameters() if p not in own and tuple(p.shape) not in router]
    return sum(p.numel() for p in shared) // (GATED * width)


def _attention(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None) and getattr(config, "q_lora_rank", None):
        return {
            "kind": "latent",
            "heads": heads,
            "query_rank": config.q_lora_rank,
            "kv_rank": config.kv_lora_rank,
            "plain_width": config.qk_nope_head_dim,
            "rotary_width": config.qk_rope_head_dim,
            "value_width": config.v_head_dim,
        }
    return {
        "kind": "grouped",
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_width": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(entry)}" for name, entry in value.items()) + " }"
    return json.dumps(value)
