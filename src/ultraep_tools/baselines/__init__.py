"""Offline baselines: planners of other projects, reimplemented to compare with.

They are entry points of the group `ultraep.policies`, so `ultraep.plan` and the tools find them by
name and import the module of a baseline when it is first used. A running balancer refuses them.
"""

from __future__ import annotations

from ultraep.policies import BUILT_IN

BASELINES = ("quota", "eplb", "lplb", "ideal")
OWN = (*BUILT_IN, *BASELINES)  # policies of this project
