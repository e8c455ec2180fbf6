"""Imports and loads what all ranks need, once: the fork server of `warm` imports this module."""

import warnings
from contextlib import suppress
from importlib import import_module

import soak.rank  # noqa: F401
import torch
from soak.training import Case, Training, Watch

from ultraep import Balancer

with warnings.catch_warnings(), suppress(ImportError):
    warnings.simplefilter("ignore")
    import_module("ultraep.runtime.hybrid.plane")
    import_module("ultraep.runtime.mapped.plane")  # needs triton
case = Case(1, 0)
balancer = Balancer._with_settings("alone", config=case.config, **case.options)
with torch.no_grad():  # no backward: its threads cannot fork
    Training(case, balancer, Watch()).layers[0](case.batch(0)[0][0])
