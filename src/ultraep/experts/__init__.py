"""Stage 6: the networks of home experts and replicas. `modules.py` first."""

from ultraep.experts.modules import Experts, ExpertsFrom

__all__ = ["Experts", "ExpertsFrom"]
