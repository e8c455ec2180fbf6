"""Every benchmark runs at toy size and writes complete rows."""

import json
from dataclasses import fields
from pathlib import Path

import bench_public
import harness
import numpy as np
import pytest
import run_all
import warm

import ultraep
from ultraep_tools.sim.planning import OWN

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("bench_*.py"))
PLAN_SECTIONS = ("quality", "tolerance", "objectives", "trace", "optimum", "speeds", "slots")


def run(script, *options):
    return warm.run(BENCHMARKS / script, *options)


def extra_options(script, folder):
    if script == "bench_frameworks.py":
        return ["--only", "transformers,transformers_fp8"]  # make test-frameworks runs the others
    if script not in ("bench_plan.py", "bench_public.py"):
        return []
    rng = np.random.default_rng(0)
    texts = {f"{name}_ids": rng.integers(0, 16, (n, 2, 2)) for name, n in (("a", 200), ("b", 70))}
    np.savez(folder / "routing.npz", **texts)
    if script == "bench_public.py":
        return ["--trace", str(folder / "routing.npz")]
    sections = ["--only", ",".join(PLAN_SECTIONS)]
    return [*sections, "--trace", str(folder / "routing.npz"), "--window", "64"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_toy_run_writes_complete_rows(script, tmp_path):
    pytest.importorskip("scipy")
    path = tmp_path / "rows.json"
    done = run(script, "--toy", "--json", str(path), *extra_options(script, tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    names = [field.name for field in fields(harness.Row)]
    assert rows
    for row in rows:
        assert list(row) == names
        assert np.isfinite(row["value"])
        assert row["device"]
        assert row["versions"]["ultraep"] == ultraep.__version__
        assert row["command"].startswith(f"python benchmarks/{script} --toy --json rows.json")
    if script == "bench_plan.py":
        assert {row["benchmark"].partition("/")[2] for row in rows} == set(PLAN_SECTIONS)
        quality = [row["case"] for row in rows if row["benchmark"] == "plan/quality"]
        assert {case["policy"] for case in quality} == set(OWN)
    keys = [(row["benchmark"], *row["case"].items(), row["metric"]) for row in rows]
    assert len(set(keys)) == len(keys)
    assert str(tmp_path) not in done.stdout + path.read_text()
    assert "…" not in done.stdout  # no table is cut off


def test_the_public_planner_needs_its_sources_and_a_gpu(tmp_path):
    with pytest.raises(
        harness.Mismatch, match=r"has no csrc/kernels/placement\.cu; pass a checkout"
    ):
        bench_public.build(tmp_path, tmp_path)
    done = run("bench_public.py", "--toy", "--public", str(tmp_path))
    assert done.returncode != 0
    assert "--public needs a GPU" in done.stderr


def test_make_bench_prints_what_it_skips():
    available = run_all.available()
    assert run_all.select_scripts(dict.fromkeys(available, True)) == (SCRIPTS, [])
    runs, skipped = run_all.select_scripts(dict.fromkeys(available, False))
    assert {*runs, *(line.split()[0] for line in skipped)} == set(SCRIPTS)
    assert "bench_control.py is skipped: it needs a GPU" in skipped


@pytest.mark.slow
def test_the_page_on_the_paper_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    done = run("paper.py", "--toy", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "paper.md").read_text()
    assert text.count("### ") == 6
    assert "nan" not in text
    assert (tmp_path / "shares.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_the_simulator_can_be_calibrated():
    done = run("calibrate_sim.py", "--toy")
    assert done.returncode == 0, done.stderr
    names = [line.partition(" = ")[0] for line in done.stdout.splitlines()]
    assert names == ["noise.training", "framework.factor", "eplb.backward_us", "lplb.layer_us"]
