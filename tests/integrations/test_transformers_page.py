"""The scripts of docs/integrations/transformers.md run, and are short."""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("ultraep.integrations.transformers.native", exc_type=ImportError)

import torch.distributed as dist
import warm
from equality import under_torchrun
from families import build
from ranks import shared_pool
from safetensors.torch import load_file
from transformers.distributed.expert_parallel import ALL_PARALLEL_STYLES

from ultraep.integrations.transformers.native import STYLE

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "transformers.md"
SCRIPTS = {
    re.match(r"# (\w+)\.py", text)[1]: text
    for text in re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
}


def run_script(rank, group, folder, name, port):
    """Run a script like torchrun, in a process that has already imported the library."""
    size = group.size()
    dist.destroy_process_group()
    printed = io.StringIO()
    before, arguments = Path.cwd(), sys.argv
    with under_torchrun(rank, size), contextlib.redirect_stdout(printed):
        os.environ["MASTER_PORT"] = port
        os.environ["ACCELERATE_USE_CPU"] = "1"
        os.chdir(folder)
        sys.argv = [f"{name}.py", str(folder / "checkpoint")]
        style = ALL_PARALLEL_STYLES[STYLE]
        try:
            runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
        finally:
            os.chdir(before)
            sys.argv = arguments
            ALL_PARALLEL_STYLES.register(STYLE, style)  # the process stays
    return printed.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("scripts")
    build("mixtral").save_pretrained(path / "checkpoint")
    for name, text in SCRIPTS.items():
        (path / f"{name}.py").write_text(text)
    return path


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run(name, folder):
    assert len(SCRIPTS[name].splitlines()) < 40
    printed = shared_pool().run(2, run_script, folder, name, warm.free_port())
    words = {
        "measure": "imbalance",
        "train": "loss",
        "trainer": "train_loss",
        "native": "imbalance",
    }
    assert words[name] in "".join(printed)


def test_scripts_write_checkpoints_of_all_experts(folder):
    whole = load_file(folder / "checkpoint" / "model.safetensors")
    for name in ("trained", "run/checkpoint-4", "native"):
        written = load_file(folder / name / "model.safetensors")
        assert {n: t.shape for n, t in written.items()} == {n: t.shape for n, t in whole.items()}
