"""Tests of `ultraep_tools.demo`."""
