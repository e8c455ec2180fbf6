"""Launches that keep plans in a ring on the GPU."""

from __future__ import annotations

import torch

from ultraep.backends.triton.device import launching
from ultraep.backends.triton.kernels import ring as kernels
from ultraep.backends.triton.launch import quick

HEADER, KEPT, STEP = (int(word.value) for word in (kernels.HEADER, kernels.KEPT, kernels.STEP))
NUMBERS = 4096  # that are copied at once


class PlanRing:
    """The last plans of a rank; nothing is allocated later, so graphs can hold it.

    `plans`: [places, HEADER + numbers].   `state`: plans that were kept so far, step of the next.
    """

    def __init__(self, places: int, numbers: int, device: torch.device) -> None:
        self.plans = torch.zeros(places, HEADER + numbers, dtype=torch.int32, device=device)
        self.state = torch.zeros(2, dtype=torch.int32, device=device)

    def keep(self, site: int, loads: torch.Tensor, result: torch.Tensor) -> None:
        """Keep this plan, whose numbers are on the device."""
        places, size = self.plans.shape
        assert HEADER + loads.numel() + result.numel() <= size, (loads.shape, result.shape, size)
        with launching(self.state.device):
            quick(kernels.keep_plan)[(1,)](
                self.plans,
                self.state,
                loads,
                result,
                site,
                places,
                size,
                loads.numel(),
                result.numel(),
                B=NUMBERS,
                num_warps=8,
            )
