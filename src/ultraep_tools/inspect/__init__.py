"""Inspect a model: run text through it on this machine, and plan its routing for many ranks.

options.py      options
library.py      import transformers, offline
model.py        checkpoints and small random models, and their experts
texts.py        windows of tokens
run.py          all of it in order
findings.py     the loads planned for all numbers of ranks; the trace of such a group
"""
