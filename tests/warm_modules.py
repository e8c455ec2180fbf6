"""Modules that the fork server of `warm` imports once for all processes."""

import gc

import quick_interpreter
import ranks  # noqa: F401

import ultraep_tools.demo.model  # noqa: F401

quick_interpreter.install()
gc.freeze()  # forked processes do not scan the modules
