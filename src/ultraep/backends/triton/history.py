"""Plans on the GPU: running sums, and a ring of the last plans."""

from __future__ import annotations

import torch

from ultraep.arrays import IntArray
from ultraep.backends.triton.device import launching
from ultraep.backends.triton.kernels import history as kernels
from ultraep.backends.triton.launch import power_of_2, quick

HEADER, KEPT, STEP = (int(word.value) for word in (kernels.HEADER, kernels.KEPT, kernels.STEP))
BLOCK = 4096  # integers copied at once


class PlanSums:
    """Adds plans of one topology to `sums`. Allocates nothing later, so that graphs can capture it.

    sums: [N] int64, in the order of the kernel.
    """

    def __init__(self, sums: torch.Tensor, home_of_expert: IntArray, ranks: int) -> None:
        self.sums, self._ranks = sums, ranks
        device = sums.device
        self._homes = torch.from_numpy(home_of_expert.copy()).to(device, torch.int32)
        self._scratch = torch.zeros(ranks, dtype=torch.int32, device=device)

    def add(
        self,
        num_replicas: torch.Tensor,
        rank_loads: torch.Tensor,
        replicas: torch.Tensor,
        quotas: torch.Tensor,
        speeds: torch.Tensor | None = None,
    ) -> None:
        """Add this plan, whose tensors are on the device. speeds: [R]; None: equal."""
        ranks, padded = power_of_2(self._ranks), power_of_2(len(quotas))
        with launching(self.sums.device):
            quick(kernels.add_plan)[(1,)](
                self.sums,
                self._scratch,
                self._homes,
                num_replicas,
                rank_loads,
                replicas,
                quotas,
                speeds,
                self._ranks,
                R=ranks,
                C=padded,
                num_warps=min(8, max(1, max(ranks, padded) // 128)),
            )


class PlanRing:
    """The last plans of a rank. Allocates nothing later, so that graphs can capture it.

    `plans`: [places, HEADER + numbers].   `state`: number of plans so far, step of the next plan.
    """

    def __init__(self, places: int, numbers: int, device: torch.device) -> None:
        self.plans = torch.zeros(places, HEADER + numbers, dtype=torch.int32, device=device)
        self.state = torch.zeros(2, dtype=torch.int32, device=device)

    def keep(self, site: int, loads: torch.Tensor, result: torch.Tensor) -> None:
        """Store this plan, whose tensors are on the device."""
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
                B=BLOCK,
                num_warps=8,
            )
