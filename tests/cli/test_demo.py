"""`ultraep demo`: its output, on a terminal and elsewhere."""

import json
import re
from dataclasses import replace

import pytest
from traces import plan_for, record

from ultraep import BalanceConfig
from ultraep.errors import BackendUnavailable, CommunicationError
from ultraep_tools.cli import demo
from ultraep_tools.demo.result import DemoResult, PolicyResult, Progress, trace_folder
from ultraep_tools.demo.sizes import Sizes

from . import commands


def policy_result(policy, after, speed, share, sent):
    values = dict.fromkeys(PolicyResult.__dataclass_fields__, 0.5)
    values |= {"policy": policy, "losses": [5.5, 2.25], "loss": 2.25}
    values |= {"seconds": [0.5, 0.5], "tokens_per_second": 4096.0}
    values |= {"before": [1.25, 1.25], "imbalance_before": 1.25, "imbalance_before_worst": 1.5}
    values |= {"after": [after, after], "imbalance_after": after, "imbalance_after_worst": after}
    values |= {"layer_tokens_per_second": speed, "layer_share": share}
    return PolicyResult(**values | {"bytes_sent": sent})


RESULT = DemoResult(
    version="0",
    python="3",
    machine="here",
    seed=0,
    sizes=Sizes(ranks=2),
    parameters=7_300_000,
    steps=2,
    domains=["code", "tables"],
    forced_tokens_per_second=20_000.0,
    requests=160,
    request_tokens=1000,
    loss_difference=1e-5,
    wall_seconds=1.0,
    notes=[],
    policies=[
        policy_result("none", 1.25, 16_000.0, 0.8, 0),
        policy_result("ultraep", 1.0, 19_200.0, 0.96, 3_000_000),
    ],
)


def invoke(*words):
    return commands.invoke("demo", *words, width=80)


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """Replace the work by its result; return the list of jobs."""
    jobs = []

    def run(job, report):
        jobs.append(job)
        report(Progress(1, 2, f"training, {job.policies[-1]}: code"))
        report(Progress(1, 1, "measuring the MoE layers"))
        return RESULT

    monkeypatch.setattr(demo, "run", run)
    return jobs


def test_the_output_describes_setup_progress_and_result(jobs, tmp_path):
    result = invoke("--no-report", "--ranks", 2, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    out = " ".join(result.stdout.split())
    assert out.startswith("demo train a small language model under every policy")
    assert "Starting 2 processes, which load torch" in out
    assert "ranks 2 ranks with one thread and 2 spare slots each" in out
    assert "running 1/2 training, ultraep: code" in " ".join(result.stderr.split())
    assert "share of forced balance 80.0% 96.0% 100.0%" in out
    assert "MoE layers: tokens/s 16,000 19,200 20,000" in out
    assert "sent for replicas 0 B 3 MB" in out
    assert "imbalance after (worst) 1.250 (1.25) 1.000 (1.00)" in out
    assert "MoE layers 1.20x as fast with ultraep, same loss." in out
    assert "96% of the speed of forced balance; losses differ by at most 1e-05" in out
    assert "\x1b" not in result.stdout
    table = result.stdout[result.stdout.index("forced balance") - 60 :]
    assert max(map(len, table.split("trace ")[0].splitlines())) <= 80


def test_options_reach_the_job(jobs, tmp_path):
    options = ("--quick", "--steps", 5, "--ranks", 4, "--seed", 3, "--policy", "none, registered")
    assert invoke("--no-report", "--out", tmp_path, *options).exit_code == 0
    (job,) = jobs
    assert (job.sizes.steps, job.sizes.ranks, job.seed) == (5, 4, 3)
    assert job.policies == ("none", "registered")
    assert job.out == str(tmp_path)


def test_the_headline_compares_speed_and_loss():
    slower = replace(RESULT.policies[1], layer_tokens_per_second=12_000.0, layer_share=0.6)
    result = replace(RESULT, policies=[RESULT.policies[0], slower], loss_difference=0.02)
    assert result.headline == "MoE layers 0.75x as fast with ultraep, losses up to 2.0% apart"
    alone = replace(RESULT, policies=[RESULT.policies[1]])
    assert alone.headline == "Imbalance 1.25 -> 1.00 with ultraep"


def test_a_failed_rank_is_one_line(monkeypatch, tmp_path):
    def run(job, report):
        raise CommunicationError("rank 1 failed")

    monkeypatch.setattr(demo, "run", run)
    result = invoke("--out", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "ultraep: rank 1 failed"


def test_a_missing_plotly_is_a_note_before_the_work(jobs, monkeypatch, tmp_path):
    def require_plotly():
        raise BackendUnavailable("pages with plots need plotly: pip install it")

    monkeypatch.setattr(demo, "require_plotly", require_plotly)
    result = invoke("--out", tmp_path)
    assert result.exit_code == 0, result.output
    note = "note: there will be no report.html: pages with plots need plotly: pip install it"
    assert result.stdout.index(note) < result.stdout.index("Starting")
    assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "result.json").exists()


def test_the_report_is_the_viewer_with_the_traces_of_all_policies(monkeypatch, tmp_path):
    pytest.importorskip("plotly")

    def run(job, report):
        for policy in job.policies:
            config = BalanceConfig(policy=policy)
            record(trace_folder(job.out, policy), [plan_for(0, config=config)], config=config)
        return RESULT

    monkeypatch.setattr(demo, "run", run)
    result = invoke("--out", tmp_path, "--ranks", 2)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text()
    baked = re.search('id="numbers-baked">(.*?)</script>', page)[1]
    assert list(json.loads(baked)["overview"]) == ["none", "ultraep"]
