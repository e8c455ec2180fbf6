"""Commands, simulator, reports, viewer, demo, baselines: the library imports none of them."""

from ultraep.tools import baselines as _baselines  # noqa: F401  # registers them
