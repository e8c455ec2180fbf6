"""Balancers of other projects, planned again here to compare with."""
