"""Soak test: train with injected faults beside a dense twin, and classify how every run ends."""
