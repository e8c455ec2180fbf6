"""Tests of `ultraep.demo`."""
