"""Routing of a model -> records of a trace.

Every module of experts that transformers' registry knows is called with hidden states, the ids that
the router chose, and gates. A hook before that call counts the ids; nothing of the model changes.

The trace is that of one rank, which has all experts and no copies. `ultraep trace replay --ep 8`
and the report deal its tokens out to more ranks.

Shapes: N tokens of a window, K choices of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.plan import plan
from ultraep.tools.inspect.anatomy import Anatomy, num_experts
from ultraep.topology import Topology
from ultraep.trace.record import Recorder

PLAIN = BalanceConfig(policy="none")
IDS = 1  # place of the ids in a call of experts: hidden states, ids, gates


class Catcher:
    """Records what the routers of some layers decide, window by window.

    window: the number of the one that goes through the model; whoever sends it says so.
    top_k: choices of a token, as far as one was seen.
    """

    def __init__(self, folder: Path, anatomy: Anatomy, topology: Topology, *, note: str) -> None:
        self._layout, self._topology = anatomy, topology
        self._recorder = Recorder(folder, topology, PLAIN, note=note)
        self.window, self.records, self.top_k = 0, 0, 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hooks are there until the end of the `with`; then the trace is complete."""
        with self._recorder, ExitStack() as stack:
            for layer, experts in self._layout.experts.items():
                hook = experts.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
                stack.callback(hook.remove)
            yield

    @property
    def dropped(self) -> int:
        """Records that were lost, since the disk was too slow."""
        return self._recorder.dropped

    def _hook(self, layer: int) -> Any:
        def caught(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._add(layer, (*args, *kwargs.values())[IDS])

        return caught

    def _add(self, layer: int, ids_NK: torch.Tensor) -> None:
        experts, chosen = self._topology.experts, ids_NK.reshape(-1)
        chosen = chosen[(chosen >= 0) & (chosen < experts)]
        loads_E = torch.bincount(chosen, minlength=experts).cpu().numpy()
        made = plan(loads_E[None], self._topology, PLAIN)
        rows = np.concatenate([loads_E, np.zeros(self._topology.slots, dtype=np.int64)])
        self._recorder.add(plan=made, slot_rows=rows, step=self.window, layer=layer)
        self.records, self.top_k = self.records + 1, ids_NK.shape[-1]


def topology_of(anatomy: Anatomy, *, slots: int, sizes: list[int]) -> Topology:
    """One rank with all experts, which `sizes` of ranks can be made of later."""
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
