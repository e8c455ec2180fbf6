"""What the server of `warm` imports before it starts a process: what most of them would import."""

import gc

import quick_interpreter
import ranks  # noqa: F401

import ultraep.tiny  # noqa: F401

quick_interpreter.install()
gc.freeze()  # no process that is forked looks through the modules
