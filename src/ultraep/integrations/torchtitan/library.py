"""torchtitan: the releases whose classes are overridden here; they move between releases."""

from __future__ import annotations

from ultraep.integrations.library import Library

LIBRARY = Library("torchtitan", ("torchtitan",), "torchtitan", oldest=(0, 3), below=(0, 4))
