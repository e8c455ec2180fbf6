"""Launches of running sums of plans on the GPU."""

from __future__ import annotations

import torch

from ultraep.arrays import IntArray
from ultraep.backends.triton.device import launching
from ultraep.backends.triton.kernels import meter as kernels
from ultraep.backends.triton.launch import power_of_2, quick


class PlanSums:
    """Adds plans of one topology to `sums`; nothing is allocated later, so graphs can hold it.

    sums: [N] of 64 bits, in the order of the kernel.
    """

    def __init__(self, sums: torch.Tensor, home_of_expert: IntArray, ranks: int) -> None:
        self.sums, self._ranks = sums, ranks
        device = sums.device
        self._homes = torch.from_numpy(home_of_expert.copy()).to(device, torch.int32)
        self._room = torch.zeros(ranks, dtype=torch.int32, device=device)

    def add(
        self,
        num_replicas: torch.Tensor,
        rank_loads: torch.Tensor,
        replicas: torch.Tensor,
        quotas: torch.Tensor,
    ) -> None:
        """Count this plan, whose numbers are on the device."""
        ranks, copies = power_of_2(self._ranks), power_of_2(len(quotas))
        with launching(self.sums.device):
            quick(kernels.add_plan)[(1,)](
                self.sums,
                self._room,
                self._homes,
                num_replicas,
                rank_loads,
                replicas,
                quotas,
                self._ranks,
                R=ranks,
                C=copies,
                num_warps=min(8, max(1, max(ranks, copies) // 128)),
            )
