"""Home experts of a rank plus replicas for a batch, run by the kernels of the engine.

Shapes: A arrived rows, n of them, D model width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ultraep.comm import moved
from ultraep.dispatch import Arrivals
from ultraep.integrations.common import Overlay, run_layer
from ultraep.integrations.serving.service import Service
from ultraep.integrations.serving.tensors import Carried, carry_experts
from ultraep.microbatch import AnyPlan, Layer
from ultraep.replicas import Replicas
from ultraep.runtime.balancer import Balancer


class ServedExperts:
    """A mixin for the experts of an engine.

    balancer, layer_index: the balancer and the index of the layer, if it is balanced.
    last_plan: the plan of the last batch.
    least_tokens: smaller batches are not planned; None: not measured yet.
    """

    service: Service | None = None
    balancer: Balancer | None = None
    layer_index: int
    last_plan: AnyPlan | None = None
    least_tokens: int | None = None
    _carried: dict[str, Carried] | None = None

    @property
    def num_homes(self) -> int:
        """Number of home experts of this rank."""
        raise NotImplementedError

    def compute(
        self, rows: torch.Tensor, gates: torch.Tensor, counts: list[int], experts: Any
    ) -> torch.Tensor:
        """Run the engine's kernel on `[n, D]` rows, `counts` rows for each expert of `experts`."""
        raise NotImplementedError

    def run_balanced(self, x: torch.Tensor, gates: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Map `[T, D]` to `[T, D]`, with `[T, K]` gates and expert ids, through all stages."""
        assert self.balancer is not None
        assert self.service is not None
        layer = Layer(self.layer_index, self.bundle, self._serve)
        return run_layer(self, layer, ids, gates, x, policy=self.service.policy(self))

    @property
    def carried(self) -> dict[str, Carried]:
        """The tensors of the experts as replicas hold them."""
        if self._carried is None or any(
            getattr(self, carried.names[0]) is not carried.tensor
            for carried in self._carried.values()
        ):
            self._carried = carry_experts(self, self.num_homes)
        return self._carried

    @property
    def bundle(self) -> dict[str, torch.Tensor]:
        """The tensors of a replica: all tensors of an expert."""
        return {name: carried.stack for name, carried in self.carried.items()}

    def _serve(self, arrivals: Arrivals, replicas: Replicas) -> torch.Tensor:
        """Return `[A, D]` outputs times gates, on home weights and on replicas."""
        begins, homes = arrivals.begins(), replicas.num_homes
        memory = replicas.served_rows(arrivals.rows)
        outputs = torch.empty_like(arrivals.rows) if memory is None else memory

        def serve(begin: int, end: int, counts: list[int], experts: Any) -> None:
            rows, gates = arrivals.rows[begin:end], arrivals.gates[begin:end]
            outputs[begin:end] = self.compute(rows, gates, counts, experts)

        if begins[homes]:
            counts = [end - begin for begin, end in pairwise(begins[: homes + 1])]
            serve(0, begins[homes], counts, self)
        for slot, (begin, end) in enumerate(pairwise(begins[homes:])):
            if begin < end:  # one by one: kernels assume contiguous experts
                serve(begin, end, [end - begin], self.replica(replicas.tensors(), slot))
        return outputs

    def replica(self, tensors: dict[str, torch.Tensor], slot: int) -> Overlay:
        """Return this layer with the tensors of one slot."""
        attributes = {}
        for name, carried in self.carried.items():
            restored = carried.restore(tensors[name][slot : slot + 1])
            attributes.update(dict.fromkeys(carried.names, restored))
        return Overlay(self, **attributes)


def ids_of_rows(counts: list[int], rows: torch.Tensor) -> torch.Tensor:
    """Return the expert of every row as `[n, 1]`, on the device of the rows."""
    each = moved(torch.tensor(counts), rows.device)
    ids = torch.arange(len(counts), dtype=torch.int32, device=rows.device)
    return ids.repeat_interleave(each, output_size=len(rows))[:, None]
