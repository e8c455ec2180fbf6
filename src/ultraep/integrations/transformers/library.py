"""transformers: the versions whose registry of experts is known."""

from __future__ import annotations

from ultraep.integrations.library import Library

LIBRARY = Library("transformers", ("transformers",), "transformers", oldest=(5, 22), below=(6, 0))
