"""Try an installed package, outside of the tree: plan, a layer, the command, its data."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import ultraep
import ultraep.metrics

assert "site-packages" in ultraep.__file__, ultraep.__file__
topology = ultraep.Topology(ranks=8, experts=32, slots=1)
plan = ultraep.plan(ultraep.workload.zipf(8, 32, ratio=2.0, top_k=4), topology)
assert plan.imbalance < 1.01, plan
moe = ultraep.BalancedMoE.swiglu(32, 64, 8, 2, balancer=ultraep.Balancer(experts=8))
moe(torch.randn(10, 32, requires_grad=True)).sum().backward()
assert ultraep.metrics.DASHBOARD.is_file()
command = Path(sysconfig.get_path("scripts")) / "ultraep"
for options in (["--version"], ["env"], ["advise", "--presets"], ["plan", "--help"]):
    done = subprocess.run([command, *options], check=True, capture_output=True, text=True)
    assert done.stdout, options
print(f"Python {sys.version.split()[0]}: ultraep {ultraep.__version__} is installed and works")
