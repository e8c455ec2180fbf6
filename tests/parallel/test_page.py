"""The Python of docs/with-ddp-fsdp-dcp.md is one program, and runs on four ranks."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch
from ranks import shared_pool

PAGE = Path(__file__).parents[2] / "docs" / "with-ddp-fsdp-dcp.md"


def run_page(rank, group, folder):
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    program = "\n".join(re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL))
    names = {"folder": folder}
    exec(program, names)
    assert names["step"](torch.ones(10, 16)) > 0
    return list(names["parallel"].expert_parameters(names["model"]))


def test_the_program_of_the_page_runs(tmp_path):
    names = shared_pool().run(4, run_page, tmp_path)
    assert names == [["1.experts.gate_up_proj", "1.experts.down_proj"]] * 4
    assert list(tmp_path.glob("*.distcp"))
