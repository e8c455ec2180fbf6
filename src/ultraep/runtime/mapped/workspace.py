"""Workspaces: the control buffers and shared memory of microbatches up to some size.

Ranks allocate together. Outside of graphs their hosts exchange their numbers of tokens and the most
rows that they were planned to serve, so that workspaces grow.

Shapes: T tokens, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ultraep.comm import Peers
from ultraep.config import AUTO
from ultraep.errors import LoadError
from ultraep.loads import invalid_ids
from ultraep.runtime.agreement import Agreement, Position
from ultraep.runtime.device_planner import DevicePlan, DevicePlanner, device_config
from ultraep.runtime.mapped.memory import MappedMemory
from ultraep.runtime.microbatch import Context
from ultraep.runtime.streams import Fetch, capturing


@dataclass(eq=False)
class Workspace:
    """Memory for microbatches up to some number of tokens. Creating one is collective.

    never_full: whether no plan can give a rank more rows than fit.
    dispatched: whether a dispatcher moves the rows, so that they need no memory here.
    """

    control: DevicePlanner
    memory: MappedMemory
    tokens: int  # of a rank
    never_full: bool
    dispatched: bool = False
    layers: set[int] = field(default_factory=set)  # whose first plan the host has seen
    most_rows: int = 0  # that ever arrived, as far as the host knows
    _fetch: Fetch | None = None  # of fault counters, values of some steps ago

    def fits(self, tokens: int, top_k: int) -> bool:
        return top_k == self.memory.top_k and tokens <= self.tokens

    def overflow(self, plan: DevicePlan) -> torch.Tensor | None:
        """Whether the plan gives some rank more rows than fit, on the device; None: impossible."""
        return None if self.never_full else (plan.rank_loads > self.memory.capacity).any()

    def check_rows(self, rows: int) -> None:
        """Raise if a rank cannot serve this many rows."""
        if rows > self.memory.capacity and not self.dispatched:
            raise LoadError(
                f"a plan with {rows} rows on one rank, but the buffers are for "
                f"{self.memory.capacity}: pass a larger capacity= to the balancer"
            )

    def poll(self) -> None:
        """Raise errors of the device that have reached the host; does not wait."""
        memory = self.memory
        if capturing(memory.peers.device) or (self._fetch is not None and not self._fetch.here()):
            return
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            *faults, rows = fetch.wait().tolist()
            self.most_rows = max(self.most_rows, rows)
            if any(faults):
                self.check()
                return
        words = (memory.signals.words[:1], self.control.faults, memory.exchange.faults)
        self._fetch = Fetch(torch.cat(words))

    def check(self) -> None:
        """Raise errors that the device has recorded since the last check; waits for it."""
        self.most_rows = max(self.most_rows, int(self.memory.exchange.faults[1]))
        self.memory.check()
        self.control.check()


class Workspaces:
    """The workspaces of one rank; the last one is the largest.

    agreement: of hosts whose messages wait for no device.
    inside: the ranks that map each other's memory; they take in the tokens of the other ranks.
    """

    def __init__(
        self, context: Context, peers: Peers, agreement: Agreement, inside: Context
    ) -> None:
        self._context, self._peers, self.agreement = context, peers, agreement
        self._inside, self._domains = inside, context.topology.ranks // inside.topology.ranks
        self.all: list[Workspace] = []
        self._most_rows = 0  # that any rank was planned to serve, as far as all ranks know

    @property
    def last(self) -> Workspace:
        return self.all[-1]

    def for_tokens(self, tokens: int, top_k: int) -> Workspace:
        """Return the workspace for this many tokens per rank; collective if it is created."""
        return self._fitting(tokens, top_k) or self._create(tokens, top_k)

    def for_microbatch(
        self,
        ids: torch.Tensor,
        place: Position,
        signature: str,
    ) -> tuple[Workspace, int]:
        """Return the workspace for the tokens of all ranks, created or enlarged if necessary.

        Also returns the most tokens of a rank if hosts exchange them, otherwise the tokens that fit
        the workspace. Rates and so plans depend on this number, so all ranks must have the same.
        """
        error = invalid_ids(ids)
        tokens, top_k = (0, 0) if error else ids.shape
        if self._alone or self._capturing:
            if error:
                raise error
            workspace = self._fitting(tokens, top_k) or self._create_alone(tokens, top_k)
            return workspace, workspace.tokens
        records = self.agreement.gather_loads(
            place,
            torch.zeros(self._context.topology.experts, dtype=torch.int64),
            signature=signature,
            refused=int(error is not None),
            tokens=tokens,
            rows=max((workspace.most_rows for workspace in self.all), default=0),
        )
        if error:
            raise error
        self.agreement.compare_inputs(records, signature)
        self._most_rows = max(self._most_rows, int(records.column("rows").max()))
        most_tokens = int(records.column("tokens").max())
        return self.for_tokens(most_tokens, top_k), most_tokens

    def must_wait(self, workspace: Workspace, layer: int) -> bool:
        """Whether the host must read this plan: the first of a layer may exceed the workspace."""
        if workspace.never_full or layer in workspace.layers or not self._can_grow:
            return False
        workspace.layers.add(layer)
        return True

    def larger(self, workspace: Workspace, rows: int) -> Workspace | None:
        """Return a workspace in which a rank can serve this many rows; None: they fit this one.

        Collective if it is created.
        """
        if rows <= workspace.memory.capacity or not self._can_grow:
            return None
        self._most_rows = max(self._most_rows, rows)
        return self.for_tokens(workspace.tokens, workspace.memory.top_k)

    @property
    def _can_grow(self) -> bool:
        """Whether ranks can allocate more rows together, now."""
        grows = self._context.capacity.setting == AUTO and not self._dispatched
        return grows and not self._capturing

    @property
    def _dispatched(self) -> bool:
        return self._context.settings.dispatcher is not None

    @property
    def _alone(self) -> bool:
        return self._context.comm.size == 1

    @property
    def _capturing(self) -> bool:
        return capturing(self._peers.device)

    def _fitting(self, tokens: int, top_k: int) -> Workspace | None:
        for workspace in reversed(self.all):
            rows = workspace.memory.capacity
            if workspace.fits(tokens, top_k) and self._context.capacity.suffices(
                rows, self._most_rows
            ):
                return workspace
        return None

    def _create_alone(self, tokens: int, top_k: int) -> Workspace:
        """Create the first workspace, or any of a single rank: no exchange is necessary."""
        if self._capturing or (self.all and not self._alone):
            sizes = ", ".join(f"{w.tokens} x {w.memory.top_k}" for w in self.all)
            raise LoadError(
                f"{tokens} tokens x {top_k} choices, but there is memory for {sizes or 'none'}, "
                "and it cannot grow here: run such a step before, outside of a graph, or call "
                "`prepare` with as many tokens"
            )
        return self._create(tokens, top_k)

    @torch.inference_mode(False)
    def _create(self, tokens: int, top_k: int) -> Workspace:
        """Create a workspace; collective. Microbatches that have begun keep theirs."""
        context, peers = self._context, self._peers
        tokens = max(1, tokens)
        largest = max((w.tokens for w in self.all if w.memory.top_k == top_k), default=0)
        if self.all and tokens > largest:  # and somewhat more: it would grow again
            largest = 1 << (tokens - 1).bit_length()
        tokens = max(tokens, largest)
        rows = tokens * top_k
        capacity = context.capacity.rows_for(rows, self._most_rows)
        control = DevicePlanner(
            context.topology,
            device_config(context.config),
            rows=rows,
            rank=context.comm.rank,
            device=peers.device,
        )
        memory = MappedMemory(
            peers,
            self._inside,
            tokens=tokens * self._domains,
            top_k=top_k,
            capacity=capacity,
        )
        never_full = capacity >= context.topology.ranks * rows or (
            context.capacity.proven and capacity >= rows * context.topology.num_domains
        )
        workspace = Workspace(
            control, memory, tokens, never_full or self._dispatched, self._dispatched
        )
        self.all.append(workspace)
        return self.all[-1]
