"""DeviceReplicas: stages 3 and 8 of one microbatch in one layer, without the host.

Shapes: A rows that there is room for, D model width, L spare slots, H home experts, P parameters of
an expert.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from ultraep.bundle import Bundle, Layout, resolve
from ultraep.modes import unseen
from ultraep.runtime.control import DevicePlan
from ultraep.runtime.data import DataPlane


class DeviceReplicas:
    """The copies that one plan wants of one bundle of home weights."""

    def __init__(
        self,
        data: DataPlane,
        plan: DevicePlan,
        layer: int,
        bundle: Bundle,
        made: torch.Tensor | None = None,
    ) -> None:
        self._data, self._plan, self._bundle = data, plan, bundle
        self._name = f"layer {layer}"
        self.made = made  # the schedule: all that backward needs of the plan
        self._lent: ExitStack | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self.sms = data.sms

    @property
    def num_homes(self) -> int:
        return self._data.streamer.homes

    def __enter__(self) -> dict[str, torch.Tensor]:
        """`[L, ...]` for every tensor of the bundle; they have come when `arrived` was called."""
        if self._lent is None:
            self.begin()
        return self._copies

    def __exit__(self, *error: object) -> None:
        assert self._lent is not None, "left a block that was not entered"
        self._lent.close()
        self._lent = None

    @unseen()
    def begin(self) -> None:
        """Begin to fill the slots, aside; nothing is sent if they still hold what is wanted."""
        data, tensors = self._data, resolve(self._bundle)
        layout = Layout.of(tensors, self.num_homes)
        with ExitStack() as stack:
            buffer = stack.enter_context(data.lend(self._name))
            rows = data.slots(layout, buffer)
            slots = data.topology.slots
            self._copies = layout.views(
                rows.local[: slots * layout.nbytes].view(slots, layout.nbytes)
            )
            if slots:
                with data.overlap.aside("weights"):
                    if self.made is None:
                        self.made = rows.local.new_empty(data.streamer.size, dtype=torch.int32)
                        data.streamer.schedule(self._plan.replicas, layout, self.made)
                    data.streamer.fill(self.made, layout, tensors, rows, buffer)
            self._lent = stack.pop_all()

    def arrived(self) -> None:
        """From here on, the weights of all copies are there."""
        self._data.overlap.join("weights")

    def served_rows(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[A, D] where others can pull from."""
        nbytes = self._data.exchange.layout.served_bytes(width * dtype.itemsize)
        region = self._data.to_write("served", nbytes)
        return self._data.exchange.served_rows(region, width, dtype)

    def served_scalars(self) -> torch.Tensor:
        """[A] a number beside each row that is served."""
        return self._plan.loads.new_empty(self._data.capacity, dtype=torch.float32)

    def gradient_rows(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[L, P] for the gradients of this rank's copies; the memory is shared by all layers."""
        slots = self._data.topology.slots
        if not slots:
            return torch.empty(0, width, dtype=dtype, device=self._data.peers.device)
        self._data.free_gradients()
        rows = self._data.gradients(width, dtype).local.view(dtype)
        return rows[: slots * width].view(slots, width)

    def reduce(self, gradients_HP: torch.Tensor) -> None:
        """Stage 8: begin to add the gradients of all copies to those of the home experts."""
        if self.made is not None:
            self._data.reduce(gradients_HP, self.made)

    def reduced(self) -> None:
        """From here on, they are added."""
        self._data.overlap.join("gradients")
