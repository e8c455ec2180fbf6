"""Replicas: the filled spare slots of one microbatch in one layer, in forward and in backward.

    with balancer.replicate(plan, gathered, bundle) as weights:      # stage 3
        outputs = ...                                                # weights["down"][slot]
    ...
    with replicas as weights:                                        # in backward: filled again
        ...
    replicas.reduce(gradients, replica_gradients)                    # stage 8

The slots are lent for the `with` block only; other layers overwrite them afterwards. Entering a
second time restores them, and sends nothing if they were not overwritten.

Shapes: H home experts of this rank, L spare slots, P parameters of an expert.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from ultraep.bundle import Bundle, Layout, resolve
from ultraep.grad_reduce import reduce_gradients
from ultraep.modes import unseen
from ultraep.plan import Plan
from ultraep.replicate import hops, send_weights
from ultraep.runtime.slots import Buffer, Contents

if TYPE_CHECKING:
    from ultraep.runtime.balancer import Balancer, Gathered


class Replicas:
    """The copies that one plan wants of one bundle of home weights."""

    def __init__(self, balancer: Balancer, plan: Plan, gathered: Gathered, bundle: Bundle) -> None:
        self.plan = plan
        self._balancer, self._gathered, self._bundle = balancer, gathered, bundle
        self._open: ExitStack | None = None

    @property
    def num_homes(self) -> int:
        return len(self.plan.topology.home_experts(self._balancer.rank))

    @unseen()
    def __enter__(self) -> dict[str, torch.Tensor]:
        """`[L, ...]` for every tensor of the bundle: what the spare slots of this rank hold."""
        tensors = resolve(self._bundle)
        layout = Layout.of(tensors, self.num_homes)
        device = next(iter(tensors.values())).device
        name = f"layer {self._gathered.layer} (step {self._gathered.step})"
        wanted = self._wanted()
        with ExitStack() as stack:
            buffer = stack.enter_context(self._balancer.pool.lend(layout, device, name, wanted))
            with self._balancer.timed("replicate", self._gathered.passage):
                self._fill(buffer, layout, tensors, wanted)
            self._open = stack.pop_all()
        return layout.views(buffer.rows)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._open is not None, "left a block that was not entered"
        self._open.close()
        self._open = None

    def reduce(self, gradients_HP: torch.Tensor, replica_gradients_LP: torch.Tensor) -> None:
        """Stage 8: add the gradients of all copies to those of the home experts, in place."""
        width, dtype = gradients_HP.shape[1], gradients_HP.dtype

        def staging(count: int) -> torch.Tensor:
            return self._balancer.pool.gradient_rows(
                "arriving", count, width, dtype, gradients_HP.device
            )

        passage = self._gathered.passage
        with self._balancer.timed("reduce", passage):
            nbytes = reduce_gradients(
                gradients_HP,
                replica_gradients_LP,
                self.plan,
                self._balancer.comm,
                staging=staging,
            )
        mine = int((self.plan.replicas[:, 1] == self._balancer.rank).sum())
        self._balancer.sent("gradients", nbytes, mine, passage)
        if passage is not None:  # nothing need come after it
            passage.served()
            passage.flush()

    def gradient_rows(self, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """`[L, P]` for the gradients of this rank's copies; the memory is shared by all layers."""
        slots = self.plan.topology.slots
        return self._balancer.pool.gradient_rows("replicas", slots, width, dtype, device)

    def _wanted(self) -> Contents:
        """What is to be in the slots of all ranks."""
        versions = self._gathered.versions[self.plan.topology.home_of_expert]
        return {
            (host, slot): (self._gathered.layer, expert, int(versions[expert]))
            for expert, host, slot in self.plan.replicas.tolist()
        }

    def _fill(
        self,
        buffer: Buffer,
        layout: Layout,
        tensors: dict[str, torch.Tensor],
        wanted: Contents,
    ) -> None:
        resident = {place for place, content in wanted.items() if buffer.held.get(place) == content}
        chunks = self._balancer.chunks
        way = hops(self.plan, self._balancer.relay, chunks=chunks, skip=resident)
        for hop in way:  # until the last byte is there, the slot holds nothing
            buffer.held.pop((hop.receiver, hop.slot), None)
        nbytes = send_weights(
            way,
            tensors,
            buffer.rows,
            layout=layout,
            plan=self.plan,
            comm=self._balancer.comm,
            chunks=chunks,
        )
        buffer.held.update(wanted)
        mine = sum(hop.sender == self._balancer.rank for hop in way)
        self._balancer.sent("weights", nbytes, mine, self._gathered.passage)
