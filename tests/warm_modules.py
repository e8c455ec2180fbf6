"""What the server of `warm` imports before it starts a process: what most of them would import."""

import gc

import quick_interpreter
import ranks  # noqa: F401

import ultraep.backends.cpu
import ultraep.backends.triton
import ultraep.runtime.mapped.plane
import ultraep.tools.tiny.model  # noqa: F401

quick_interpreter.install()
gc.freeze()  # no process that is forked looks through the modules
