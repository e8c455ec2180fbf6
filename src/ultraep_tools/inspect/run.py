"""Inspection: open a model and its texts, record its routing, and plan it for many ranks.

OUT/
|-- trace/              a group of ranks that balances these loads, for `ultraep view` and others
|-- result.json         facts about the run; imbalance by case, layer and text
`-- .ultraep-inspection marker: the next inspection replaces these files

Shapes: H layers, W windows, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
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
from ultraep_tools.inspect.findings import Findings, Progress, find, topology_of, write_trace
from ultraep_tools.inspect.library import library_errors
from ultraep_tools.inspect.model import InspectedModel
from ultraep_tools.inspect.options import InspectOptions
from ultraep_tools.inspect.texts import TextSpan, hashed_words, texts_of, tokenizer_of, windows_of
from ultraep_tools.outputs import prepare_folder
from ultraep_tools.report.page import RESULT_FILE

TRACE = "trace"
USUAL_SIZES = (8, 16, 64)


class _LastLayerRecorded(Exception):
    """The rest of the model need not run."""


class Inspection:
    """A model opened without its weights, and the texts for it."""

    def __init__(self, options: InspectOptions) -> None:
        self.options, self.notes = options, list[str]()
        self.model = InspectedModel(options)
        self.layers = _layers(self.model, options.recorded_layers)
        self.experts = experts_per_layer(self.model, self.layers)
        sizes = _sizes(options.sizes, self.experts)
        self.topologies = [topology_of(size, self.experts, options.slots) for size in sizes]
        self.texts, self.windows = self._windows()
        if options.random is not None:
            self.notes.append("weights are random: a trained model has another imbalance")
        self.loads_HWE = np.zeros((len(self.layers), len(self.windows), self.experts), np.int64)
        self.top_k = 0  # experts per token; known after the first window

    def _windows(self) -> tuple[list[TextSpan], list[IntArray]]:
        options, config = self.options, self.model.config.get_text_config()
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
        window, text, layers = 0, "", len(self.layers)

        def before_experts(place: int, _: Any, args: tuple[Any, ...], more: dict[str, Any]) -> None:
            done, steps = window * layers + place, len(self.windows) * layers
            report(done, steps, f"{text}, layer {self.layers[place]}")
            _, ids_NK, *_ = (*args, *more.values())  # hidden states, ids, gates
            ids = ids_NK[(ids_NK >= 0) & (ids_NK < self.experts)]
            loads_E = torch.bincount(ids, minlength=self.experts)
            self.loads_HWE[place, window] = loads_E.cpu().numpy()
            self.top_k = ids_NK.shape[-1]
            if place == layers - 1:
                raise _LastLayerRecorded

        with ExitStack() as stack:
            model = stack.enter_context(self.model.loaded())
            stack.enter_context(library_errors(self.model.path, "transformers cannot run it"))
            stack.enter_context(torch.no_grad())
            for place, layer in enumerate(self.layers):
                experts = model.get_submodule(self.model.experts[layer])
                hook = partial(before_experts, place)
                stack.enter_context(experts.register_forward_pre_hook(hook, with_kwargs=True))
            for window, ids in enumerate(self.windows):
                text = next(span.name for span in self.texts if window <= span.end)
                with suppress(_LastLayerRecorded):
                    input_ids = torch.from_numpy(ids).to(self.model.device)
                    model.get_decoder()(input_ids=input_ids, use_cache=False)

    def findings(self, report: Progress) -> Findings:
        return find(self.loads_HWE, self.layers, self.texts, self.topologies, report)

    def result(self, findings: Findings, seconds: float) -> dict[str, Any]:
        """Facts about the model and the run; imbalance by case, layer and text."""
        model = self.model
        return {
            "version": __version__,
            "model": self.options.name,
            "family": model.config.model_type,
            "random": self.options.random is not None,
            "parameters": model.parameters,
            "layers": self.layers,
            "experts": self.experts,
            "top_k": self.top_k,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
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
        """Write the trace of the first number of ranks, and the result."""
        out = self.options.out
        spans = ", ".join(f"{span.name} {span.begin} to {span.end}" for span in self.texts)
        note = f"ultraep inspect {self.options.name}; steps are windows of text: {spans}"
        write_trace(out / TRACE, self.loads_HWE, self.layers, self.topologies[0], note)
        write_text(out / RESULT_FILE, json.dumps(result, indent=1) + "\n")


def prepare_outputs(out: Path) -> None:
    """Remove the outputs of an earlier inspection."""
    prepare_folder(out, "inspection", (TRACE, RESULT_FILE))


# -- options -------------------------------------------------------------------------------------


def _layers(model: InspectedModel, layers: tuple[int, ...] | None) -> list[int]:
    for layer in layers or ():
        if layer not in model.experts:
            names = ", ".join(map(str, model.experts))
            raise ConfigError(f"--layers {layer}: layers with experts are {names}")
    return list(model.experts if layers is None else layers)


def _sizes(sizes: tuple[int, ...] | None, experts: int) -> list[int]:
    if sizes is None:
        fitting = [size for size in USUAL_SIZES if size <= experts]
        return fitting or [1 << (experts.bit_length() - 1)]
    for size in sizes:
        if not 1 <= size <= experts:
            raise ConfigError(f"--ep {size}: ranks must lie between 1 and the {experts} experts")
    return list(sizes)


def experts_per_layer(model: InspectedModel, layers: Sequence[int]) -> int:
    """Return the number of experts, which must be the same in all layers."""
    experts = model.counts[layers[0]]
    for layer in layers:
        if model.counts[layer] != experts:
            raise ConfigError(
                f"layer {layers[0]} has {experts} experts, layer {layer} has "
                f"{model.counts[layer]}; all layers of a trace must have the same number, select "
                "them with --layers"
            )
    return experts
