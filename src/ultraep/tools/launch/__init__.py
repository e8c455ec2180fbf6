"""Processes of one host that form a group, for the demo and for load tests."""
