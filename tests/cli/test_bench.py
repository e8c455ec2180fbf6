"""`ultraep bench prefill`: output, files, failing servers and interruption."""

import json
import os
import re
import signal

import pytest
from demo.runs import LIMIT, children, gone, start
from serving.models import save_tiny
from serving.servers import serving

from . import commands

FAST = ("--rate", "20,40", "--seconds", "0.3", "--rounds", "1", "--longest", "32")


def invoke(*words, width=100):
    return commands.invoke("bench", "prefill", *words, width=width)


def test_servers_are_compared_in_table_json_and_page(tmp_path):
    pytest.importorskip("plotly")
    files = "--json", tmp_path / "rows.json", "--html", tmp_path / "page.html"
    with serving(delay=0.01) as quick, serving(delay=0.2) as slow:
        names = f"slow={slow.url}", f"quick={quick.url}"
        result = invoke(*FAST, *files, *(part for name in names for part in ("--endpoint", name)))
    assert result.exit_code == 0, result.output
    out = " ".join(result.stdout.split())
    assert "servers slow at http://127.0.0.1:" in out
    assert "work 4 runs, 1 s of arrivals in total" in out
    assert re.search(r"First token after 0\.\d+ s with quick, 0\.\d+ s with slow \(\d", out)
    assert "measuring 4/4" in " ".join(result.stderr.split())
    rows = json.loads((tmp_path / "rows.json").read_text())
    gain = [
        r["value"]
        for r in rows
        if r["metric"] == "first_token_gain" and r["case"]["policy"] == "quick"
    ]
    assert len(gain) == 2
    assert min(gain) > 1.5
    page = (tmp_path / "page.html").read_text()
    assert re.search(r"<h1>First token after 0\.\d+ s with quick", page)


def test_finished_runs_are_printed_when_a_server_fails(tmp_path):
    with serving("hang") as server:
        options = "--endpoint", server.url, "--timeout", "0.2", "--json", tmp_path / "rows.json"
        result = invoke(*FAST, *options)
    assert result.exit_code == 2
    assert "dropped after 8 prompts in a row" in result.stderr
    assert "no answer in time" in result.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["value"] for row in rows if row["metric"] == "within_1_s"} == {0.0}


@pytest.mark.slow
def test_an_interruption_writes_finished_runs_and_leaves_no_process(tmp_path):
    model = save_tiny(tmp_path / "tiny")
    options = "--model", model, "--longest", 32, "--budget", 64, "--policy", "none", "--rounds", 9
    options += "--seconds", 2, "--rate", 20, "--json", tmp_path / "rows.json"
    process = start("-m", "ultraep", "bench", "prefill", *options)
    try:
        for line in process.stderr:
            if line.startswith("measuring"):
                break
        ranks = children(process.pid)
        os.kill(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 130
        assert "interrupted; the table shows the finished runs" in errors
        assert "Traceback" not in errors
        assert "First token after" in out
    finally:
        assert gone([*ranks, process.pid])
    assert len(ranks) == 2
    assert json.loads((tmp_path / "rows.json").read_text())
