"""`save_pretrained` of a balanced model: writes the same checkpoint as the unbalanced model.

The writing rank gathers the experts layer by layer and writes shard by shard, so its memory holds
at most one shard and the experts of one layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from ultraep.errors import ConfigError
from ultraep.integrations.transformers.experts import (
    BalancedExperts,
    balanced_experts,
    expert_owners,
)
from ultraep.integrations.transformers.quantised import (
    METHODS,
    Mxfp4Experts,
    quantiser_of,
    stored_mxfp4,
)
from ultraep.runtime.state import gather_experts

State = dict[str, torch.Tensor]
UNITS = {f"{unit}B": 1000**power for power, unit in enumerate("KMGT", start=1)}
UNITS |= {f"{unit}IB": 1024**power for power, unit in enumerate("KMGT", start=1)}
IGNORED_OPTIONS = ("save_peft_format", "token")  # they do not affect the weights


def save_pretrained(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    *,
    max_shard_size: int | str = "50GB",
    save_original_format: bool = True,
    variant: str | None = None,
    **options: Any,
) -> None:
    """Write the checkpoint of all experts. Collective.

    Takes the arguments of the library. Refuses `options` that would change the weights.
    """
    plain = type(model).save_pretrained
    if getattr(model, "_hf_peft_config_loaded", False):  # adapters only, and experts have none
        plain(model, save_directory, is_main_process=is_main_process, variant=variant, **options)
        return
    changed = {name for name, value in options.items() if value not in (None, False)}
    refused = sorted(changed.difference(IGNORED_OPTIONS))
    if refused:
        raise ConfigError(
            f"save_pretrained of a balanced model does not support {', '.join(refused)}"
        )
    quantiser = quantiser_of(model)
    if quantiser not in (None, *METHODS):
        raise ConfigError(
            f"save_pretrained of a balanced model quantised by {quantiser} is not supported: call "
            "unbalance first"
        )
    limit, writer = _bytes_of(max_shard_size), None
    writes = model.should_save_on_this_rank(is_main_process)
    if writes:
        _save_all_but_weights(model, save_directory, variant)
        writer = ShardWriter(Path(save_directory), limit, variant)
    for piece in pieces_of(model, writes):
        if writer is not None:
            writer.add(revert_weight_conversion(model, piece) if save_original_format else piece)
    for piece in mxfp4_pieces(model, writes):
        if writer is not None:
            writer.add(piece)
    if writer is not None:
        writer.close()
    if dist.is_initialized():
        dist.barrier()


def _save_all_but_weights(model: Any, folder: str | Path, variant: str | None) -> None:
    quantiser = model.__dict__.pop("hf_quantizer", None)  # it would write the weights of this rank
    try:
        type(model).save_pretrained(model, folder, state_dict={}, variant=variant)
    finally:
        if quantiser is not None:
            model.hf_quantizer = quantiser


def mxfp4_pieces(model: nn.Module, keep: bool) -> Iterator[State]:
    """Yield blocks and scales of all MXFP4 experts, layer by layer, on the host. Collective."""
    for name, experts in balanced_experts(model).items():
        if isinstance(experts, Mxfp4Experts):
            stored = {
                f"{name}.{key}": _gathered(tensor, experts)
                for key, tensor in stored_mxfp4(experts).items()
            }
            yield {key: tensor.cpu() for key, tensor in stored.items()} if keep else {}


def pieces_of(model: nn.Module, keep: bool) -> Iterator[State]:
    """Yield the state with all experts, layer by layer, on the host. Collective.

    keep: False: take part in the collective, but yield empty pieces.
    """
    state = dict(model.state_dict())
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    state = remove_tied_weights_from_state_dict(state, model)
    layers: dict[str, list[str]] = {}
    for name in state:
        layer = re.match(r"(.*?\.\d+)\.", name)
        layers.setdefault(layer[1] if layer else "", []).append(name)
    owners = expert_owners(model)
    for names in layers.values():
        piece = {}
        for name in names:
            tensor = state.pop(name)
            if name in owners:
                tensor = _gathered(tensor, owners[name])
            if keep:
                piece[name] = tensor.detach().cpu()
        yield piece


def _gathered(stacked: torch.Tensor, owner: BalancedExperts) -> torch.Tensor:
    """Return the tensor of all experts on the rank that writes it."""
    group = owner.balancer.group
    ranks = dist.get_process_group_ranks(group) if group is not None else [0]
    writer = ranks.index(0) if 0 in ranks else 0
    owner.balancer.at_state(owner.layer_index, stacked.device)
    return gather_experts(stacked, owner.balancer, only=writer)


def _bytes_of(size: int | str) -> int:
    """Convert a size such as "5GB" to bytes.

    >>> _bytes_of("2MB"), _bytes_of("1.5 GiB"), _bytes_of(10)
    (2000000, 1610612736, 10)
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"([\d.]+) ?([KMGT]i?B)", size, re.IGNORECASE)
    if match is None:
        raise ConfigError(
            f'max_shard_size must be a number of bytes or a text such as "5GB", got {size!r}'
        )
    return int(float(match[1]) * UNITS[match[2].upper()])


class ShardWriter:
    """Writes tensors into files of limited size, and an index if there are several files."""

    def __init__(self, folder: Path, limit: int, variant: str | None) -> None:
        self._folder, self._limit = folder, limit
        self._middle = f".{variant}" if variant else ""
        self._pending: State = {}
        self._files: list[list[str]] = []  # names of tensors in every file
        self._pending_bytes = self._bytes = 0

    def add(self, tensors: State) -> None:
        """Queue tensors; write a file when the queue is full."""
        for name, tensor in tensors.items():
            if self._pending and self._pending_bytes + tensor.nbytes > self._limit:
                self._write()
            self._pending[name] = tensor.contiguous()
            self._pending_bytes += tensor.nbytes

    def close(self) -> None:
        """Write the rest, rename the files and write the index."""
        if self._pending:
            self._write()
        total = len(self._files)
        names = [self._name(index, total) for index in range(total)]
        path = self._folder / f"model.safetensors.index{self._middle}.json"
        for stale in (path, self._folder / self._name(0, 1)):  # left by an earlier save
            stale.unlink(missing_ok=True)
        for number, name in enumerate(names):
            self._temporary(number).replace(self._folder / name)
        if total > 1:
            where = {t: name for name, held in zip(names, self._files, strict=True) for t in held}
            index = {"metadata": {"total_size": self._bytes}, "weight_map": where}
            path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        self._bytes, self._pending_bytes = self._bytes + self._pending_bytes, 0
        path = self._temporary(len(self._files))
        save_file(self._pending, path, metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending = {}

    def _temporary(self, index: int) -> Path:
        return self._folder / f"unfinished-{index:05d}.safetensors"

    def _name(self, index: int, total: int) -> str:
        if total == 1:
            return f"model{self._middle}.safetensors"
        return f"model{self._middle}-{index + 1:05d}-of-{total:05d}.safetensors"
