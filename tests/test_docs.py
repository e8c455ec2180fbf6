"""Python blocks in the documentation run as written."""

import re

import pytest
from test_docs_names import PAGES, ROOT

from ultraep import policies

# test_examples.py runs it under torchrun.
FIRST = (ROOT / "examples" / "first.py").read_text()
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    if block != FIRST
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block, monkeypatch):
    import numpy as np
    import torch

    import ultraep

    for name in policies.policy_names():
        policies.get_policy(name)  # import all before the registry is copied
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))
    topology = ultraep.Topology(ranks=8, experts=32, slots=1)
    loads = ultraep.workload.zipf(8, 32, ratio=2.0, top_k=4, tokens=64)
    exec(
        block, {"np": np, "torch": torch, "ultraep": ultraep, "topology": topology, "loads": loads}
    )
