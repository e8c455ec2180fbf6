"""`ultraep view`: a page to share, damaged traces, and a server that Ctrl-C ends."""

import json
import re
import shutil
import signal
import subprocess

import pytest
from traces import plan_for, record

from .commands import invoke, start

httpx = pytest.importorskip("httpx")
pytest.importorskip("plotly")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return record(
        tmp_path_factory.mktemp("view") / "run", [plan_for(n) for n in range(6)], layers=2
    )


def test_a_page_to_share(run, tmp_path):
    result = invoke("view", run, "--export", tmp_path / "run.html")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'run.html'}: 6 records\n")
    page = (tmp_path / "run.html").read_text("utf-8")
    assert '<meta name="generator" content="ultraep">' in page[:4096]
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    ("name", "words"), [("newer", "version 99 of the"), ("torn", "truncated or damaged")]
)
def test_a_damaged_trace_is_an_error(run, tmp_path, name, words):
    other = shutil.copytree(run, tmp_path / "other")
    text = (other / "header.json").read_text()
    newer = json.dumps(json.loads(text) | {"version": 99})
    (other / "header.json").write_text(newer if name == "newer" else text[:30])
    result = invoke("view", other)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "nothing to show" in result.stderr
    result = invoke("view", other, run, "--export", tmp_path / "run.html")
    assert result.exit_code == 0, result.stderr
    assert words in result.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_it_serves_until_a_signal(run, number):
    process = start("view", run, "--port", 0, stdout=subprocess.PIPE)
    line = process.stdout.readline()
    assert re.match(r"http://127.0.0.1:\d+/  \(Ctrl-C stops it\)\n", line)
    assert httpx.get(line.split()[0], trust_env=False, timeout=300).status_code == 200
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert (out, err) == ("", "")
    assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGTERM)
