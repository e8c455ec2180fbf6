"""transformers: the versions whose registry of experts is known."""

from __future__ import annotations

from dataclasses import replace

from ultraep.integrations.library import Library

LIBRARY = Library("transformers", ("transformers",), "transformers", oldest=(5, 17), below=(6, 0))
# Since then the library asks a registry how to dispatch tokens.
OWN_EXPERT_PARALLELISM = replace(LIBRARY, name="enable(): transformers", oldest=(5, 22))
