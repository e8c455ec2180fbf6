"""Megatron-Core: the versions whose layers, experts and hooks are used here."""

from __future__ import annotations

from ultraep.integrations.library import Library

LIBRARY = Library("Megatron-Core", ("megatron-core",), "megatron", oldest=(0, 16), below=(0, 17))
