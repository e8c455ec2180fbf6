"""Stage 6: run the networks of home experts and replicas. Start with `modules.py`."""

from ultraep.experts.custom import ExpertsFrom
from ultraep.experts.modules import Experts

__all__ = ["Experts", "ExpertsFrom"]
