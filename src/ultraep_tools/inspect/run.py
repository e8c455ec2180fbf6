"""Inspection: open a model and its texts, record its routing, and plan it for many ranks.

OUT/
|-- trace/              a group of ranks that balances these loads, for `ultraep view` and others
|-- result.json         facts about the run; imbalance by case, layer and text
|-- model.toml          the sizes of the model, for the simulator
`-- .ultraep-inspection marker: the next inspection replaces these files

Shapes: H layers, W windows, E experts.
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ultraep import __version__
from ultraep.arrays import IntArray
from ultraep.errors import ConfigError, FileError
from ultraep.files.writing import write_text
from ultraep_tools.inspect.blocks import Anatomy, num_experts, run_windows
from ultraep_tools.inspect.checkpoint import Checkpoint, RandomModel
from ultraep_tools.inspect.findings import Findings, Progress, find, topology_of, write_trace
from ultraep_tools.inspect.library import library_errors
from ultraep_tools.inspect.options import InspectOptions
from ultraep_tools.inspect.preset import parameters, preset
from ultraep_tools.inspect.texts import TextSpan, hashed_words, texts_of, tokenizer_of, windows_of
from ultraep_tools.outputs import prepare_folder
from ultraep_tools.report.page import RESULT_FILE

TRACE, PRESET_FILE = "trace", "model.toml"
USUAL_SIZES = (8, 16, 64)


class Inspection:
    """A model opened without its weights, and the texts for it."""

    def __init__(self, options: InspectOptions) -> None:
        self.options, self.notes = options, list[str]()
        self.opened = _open(options)
        anatomy = self.opened.anatomy
        self.anatomy = anatomy.only(_layers(anatomy, options.recorded_layers))
        self.layers, self.experts = list(self.anatomy.experts), experts_per_layer(self.anatomy)
        sizes = _sizes(options.sizes, self.experts)
        self.topologies = [topology_of(size, self.experts, options.slots) for size in sizes]
        self.texts, self.windows = self._windows()
        if options.random is not None:
            self.notes.append("weights are random: a trained model has another imbalance")
        blocks = list(anatomy.blocks)
        last = max(blocks.index(name) for name in self.anatomy.block_of_layer.values())
        self.blocks = blocks[: last + 1]  # that must run
        self.loads_HWE = np.zeros((len(self.layers), len(self.windows), self.experts), np.int64)
        self.top_k = 0  # experts per token; known after the first window

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

    def record(self, report: Progress) -> None:
        """Run all windows through the model and count the choices of its routers."""
        path, window = self.options.model or Path(self.options.name), 0

        def before_block(block: str, number: int) -> None:
            nonlocal window
            window, place = number, self.blocks.index(block)
            text = next(span.name for span in self.texts if window <= span.end)
            words = f"layer {place} of {len(self.anatomy.blocks)}, {text}"
            done = place * len(self.windows) + window
            report(done, len(self.blocks) * len(self.windows), words)

        def before_experts(place: int, _: Any, args: tuple[Any, ...], more: dict[str, Any]) -> None:
            _, ids_NK, *_ = (*args, *more.values())  # hidden states, ids, gates
            ids = ids_NK[(ids_NK >= 0) & (ids_NK < self.experts)]
            loads_E = torch.bincount(ids, minlength=self.experts)
            self.loads_HWE[place, window] = loads_E.cpu().numpy()
            self.top_k = ids_NK.shape[-1]

        with ExitStack() as stack:
            stack.enter_context(library_errors(path, "transformers cannot run it"))
            for place, experts in enumerate(self.anatomy.experts.values()):
                hook = partial(before_experts, place)
                stack.enter_context(experts.register_forward_pre_hook(hook, with_kwargs=True))
            ids = [torch.from_numpy(window).to(self.opened.device) for window in self.windows]
            run_windows(self.anatomy, ids, self.opened.loaded, before_block, self.blocks[-1])

    def findings(self, report: Progress) -> Findings:
        return find(self.loads_HWE, self.layers, self.texts, self.topologies, report)

    def result(self, findings: Findings, seconds: float) -> dict[str, Any]:
        """Facts about the model and the run; imbalance by case, layer and text."""
        opened = self.opened
        return {
            "version": __version__,
            "model": self.options.name,
            "family": opened.config.model_type,
            "random": self.options.random is not None,
            "parameters": parameters(opened.model),
            "layers": self.layers,
            "experts": self.experts,
            "top_k": self.top_k,
            "dtype": str(opened.dtype).removeprefix("torch."),
            "device": str(opened.device),
            "texts": [asdict(span) for span in self.texts],
            "window": max(window.size for window in self.windows),
            "sequence": self.windows[0].shape[1],
            "wall_seconds": seconds,
            "notes": self.notes,
            "rows": [outcome.to_json() for outcome in findings.outcomes.values()],
            "by_layer": findings.by_layer,
            "by_text": findings.by_text,
        }

    def save(self, result: dict[str, Any]) -> None:
        """Write the trace of the first number of ranks, the result, and the sizes of the model."""
        opened, out = self.opened, self.options.out
        spans = ", ".join(f"{span.name} {span.begin} to {span.end}" for span in self.texts)
        note = f"ultraep inspect {self.options.name}; steps are windows of text: {spans}"
        write_trace(out / TRACE, self.loads_HWE, self.layers, self.topologies[0], note)
        write_text(out / RESULT_FILE, json.dumps(result, indent=1) + "\n")
        config = opened.config.get_text_config()
        text = preset(self.options.name, opened.model, config, opened.anatomy, self.top_k)
        write_text(out / PRESET_FILE, text)


def prepare_outputs(out: Path) -> None:
    """Remove the outputs of an earlier inspection."""
    prepare_folder(out, "inspection", (TRACE, RESULT_FILE, PRESET_FILE))


# -- options -------------------------------------------------------------------------------------


def _open(options: InspectOptions) -> Checkpoint | RandomModel:
    device = _device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.random is not None:
        return RandomModel(options.random, device=device, dtype=dtype)
    assert options.model is not None
    if dtype is None and device.type == "cpu":
        dtype = torch.float32  # the fastest dtype on most CPUs
    return Checkpoint(options.model, device=device, dtype=dtype)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    device, count = torch.device(name), torch.cuda.device_count()
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
