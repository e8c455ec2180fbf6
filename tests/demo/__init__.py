"""Tests of `ultraep.tools.demo`."""
