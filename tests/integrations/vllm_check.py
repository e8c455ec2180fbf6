"""What the plug-in does inside of vLLM, with real servers: `make test-vllm` runs this, CI does not.

Prints a line for every check, and ends with 1 if one fails. Needs an environment with vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path

from vllm_engines import (
    Server,
    answers_alone,
    logged_by_plugin,
    make_model,
    make_prompts,
    serving,
)

import ultraep
from ultraep.integrations.library import VLLM

PROMPTS = make_prompts()
FAILED: list[str] = []
TIE = 0.05  # of two tokens in half precision: some last places of a logit


def check(told: str, holds: bool, figure: object = "") -> None:
    """Print a line, and remember what does not hold."""
    print(f"  {'ok    ' if holds else 'FAILED'} {told}{f': {figure}' if figure != '' else ''}")
    sys.stdout.flush()
    if not holds:
        FAILED.append(told)


class Bench:
    """Models and answers that several sections need, made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._answers: dict[tuple[str, str], list[list[int]]] = {}
        self.ahead: list[list[float]] = []  # of the second best, for the answers asked for last

    def model(self, kind: str) -> Path:
        folder = self.folder / kind
        return folder if folder.exists() else make_model(kind, folder)

    def alone(self, kind: str, dtype: str) -> list[list[int]]:
        """The answers of one process, in which nothing of ours is asked for."""
        if (kind, dtype) not in self._answers:
            found, self.ahead, log = answers_alone(self.model(kind), dtype, PROMPTS)
            check(f"{kind} {dtype} alone: the plug-in is silent", not logged_by_plugin(log))
            self._answers[kind, dtype] = found
        return self._answers[kind, dtype]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def compare(
    server: Server, expected: list[list[int]], ahead: list[list[float]] | None = None
) -> None:
    """Greedy tokens, of many clients, again with cached prefixes, and one by one: idle ranks.

    ahead: in half precision sums are rounded elsewhere, so that where the two best tokens are as
    good as equal, either of them is right; what follows the other one is not compared.
    """
    for told, clients in (("6 clients", 6), ("again, prefixes cached", 6), ("one by one", 1)):
        found, equal, ties = server.complete_all(PROMPTS, clients), 0, 0
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            same = [a == b for a, b in zip(mine, theirs, strict=True)]
            until = same.index(False) if False in same else len(same)
            equal += until
            if until < len(same) and ahead is not None and ahead[number][until] < TIE:
                ties += len(same) - until
        tokens = sum(map(len, expected))
        figure = f"{equal}/{tokens}" + f", {ties} from a tie on" * (ties > 0)
        check(f"tokens equal those of one process, {told}", equal + ties == tokens, figure)


def count(server: Server, *, left_alone: bool) -> None:
    """The page of metrics knows what was done."""
    found = server.metrics()
    mean = {
        when: found[f'ultraep_imbalance_{when}_sum{{policy="ultraep"}}']
        / found[f'ultraep_imbalance_{when}_count{{policy="ultraep"}}']
        for when in ("before", "after")
    }
    sent, planned = found["ultraep_copies_sent_total"], found["ultraep_copies_planned_total"]
    alone = found.get('ultraep_imbalance_before_count{policy="none"}', 0)
    shown = f"{mean['before']:.3f} -> {mean['after']:.3f}"
    check("metrics: imbalance", mean["before"] > mean["after"] >= 1, shown)
    check(
        "metrics: copies that are there are not sent again",
        0 < sent < planned,
        f"{sent:.0f} of {planned:.0f} sent",
    )
    check(
        "metrics: bytes and seconds",
        found["ultraep_weights_sent_bytes_total"] > 0
        and found['ultraep_stage_seconds_total{stage="experts"}'] > 0,
    )
    check(
        "metrics: layers of batches that were left alone", (alone > 0) == left_alone, f"{alone:.0f}"
    )


def said(server: Server) -> None:
    """One line of log says what is done."""
    lines = server.said()
    check("the log has one line", len(lines) == 1, lines[0] if lines else "none")


def two_ranks(bench: Bench) -> None:
    """Qwen3-MoE, float32, DP2, set up by the environment; a load; a rank that dies."""
    expected = bench.alone("Qwen3Moe", "float32")
    options = "--data-parallel-size", "2", "--dtype", "float32"
    log = bench.log("two")
    with serving(
        bench.model("Qwen3Moe"), log, *options, variables={"ULTRAEP_SLOTS": "1"}
    ) as server:
        compare(server, expected)
        said(server)
        count(server, left_alone=True)
        begin = time.perf_counter()
        answers = server.complete_all(PROMPTS * 6, 8)
        seconds = time.perf_counter() - begin
        check("a load of 60 requests by 8 clients", answers == expected * 6, f"{seconds:.1f} s")
        os.kill(server.workers()[1], signal.SIGKILL)
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            server.complete(PROMPTS[3])
        check("a rank that dies ends the server, and leaves nothing behind", server.is_gone(90))


def four_ranks(bench: Bench) -> None:
    """GLM-4-MoE (10 experts on 4 ranks, and a shared one), float32, DP4, --additional-config."""
    expected = bench.alone("Glm4Moe", "float32")
    options = ["--data-parallel-size", "4", "--dtype", "float32", "--api-server-count", "1"]
    options += ["--additional-config", '{"ultraep": {"slots": 2, "min_rows": 1}}']
    with tempfile.TemporaryDirectory() as page:
        variables = {"PROMETHEUS_MULTIPROC_DIR": page}
        model, log = bench.model("Glm4Moe"), bench.log("four")
        with serving(model, log, *options, variables=variables) as server:
            compare(server, expected)
            said(server)
            count(server, left_alone=False)


def half_precision(bench: Bench) -> None:
    """Qwen3-MoE, DP2, in bfloat16, or in float16 where the processor has no bfloat16."""
    dtype = "bfloat16"
    if lacks_bfloat16():
        print(
            "  skipped bfloat16: this processor lacks it, and vLLM ends with an illegal instruction"
        )
        dtype = "float16"
    expected = bench.alone("Qwen3Moe", dtype)
    options = "--data-parallel-size", "2", "--dtype", dtype, "--api-server-count", "1"
    folder = bench.folder / "trace"
    variables = {"ULTRAEP_SLOTS": "1", "ULTRAEP_MIN_ROWS": "1", "ULTRAEP_KEEP": "0"}
    variables["ULTRAEP_RECORD"] = str(folder)
    model, log = bench.model("Qwen3Moe"), bench.log("half")
    ahead = bench.ahead
    with serving(model, log, *options, variables=variables) as server:
        compare(server, expected, ahead)
        said(server)
        time.sleep(3)  # for the trace: vLLM kills what computes when it ends
    records = len(ultraep.read_trace(folder))
    check("a trace of all microbatches", records > 0, f"{records} records")


def biases(bench: Bench) -> None:
    """gpt-oss, whose experts have biases, float32, DP2, two copies on a rank."""
    expected = bench.alone("GptOss", "float32")
    options = "--data-parallel-size", "2", "--dtype", "float32", "--api-server-count", "1"
    folder = bench.folder / "copies"
    variables = {"ULTRAEP_SLOTS": "2", "ULTRAEP_MIN_ROWS": "1", "ULTRAEP_RECORD": str(folder)}
    with serving(bench.model("GptOss"), bench.log("bias"), *options, variables=variables) as server:
        compare(server, expected)
        said(server)
        time.sleep(3)  # for the trace, as above
    second = int((ultraep.read_trace(folder).copies[:, 2] == 1).sum())
    check("copies in second slots", second > 0, second)


def refused(bench: Bench) -> None:
    """Tensor-parallel ranks are left alone with the reason; a wrong setting stops the start."""
    expected = bench.alone("Qwen3Moe", "float32")
    os.environ["ULTRAEP_SLOTS"] = "1"
    model = bench.model("Qwen3Moe")
    found, _, log = answers_alone(model, "float32", PROMPTS, tensor_parallel_size=2)
    lines = [line.split("] ", 1)[-1] for line in log.splitlines() if "balances nothing" in line]
    check("TP2 is left alone, and the log says why", len(lines) == 1, lines[0] if lines else "none")
    check("its tokens are those of one process", found == expected)
    os.environ["ULTRAEP_SLOTS"] = "many"
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    del os.environ["ULTRAEP_SLOTS"]
    told = "ULTRAEP_SLOTS must be an integer, got 'many'"
    check("a wrong setting stops the start", done.returncode != 0 and told in done.stderr, told)


def lacks_bfloat16() -> bool:
    """Whether this is an Arm processor without the instructions that vLLM's kernels need."""
    if platform.machine() != "aarch64":
        return False
    return " bf16" not in Path("/proc/cpuinfo").read_text()


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "two_ranks": two_ranks,
    "four_ranks": four_ranks,
    "half_precision": half_precision,
    "biases": biases,
    "refused": refused,
}


def main() -> None:
    """Run the sections that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="some sections")
    chosen = parser.parse_args().only.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended
    where = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"ultraep {ultraep.__version__} in vLLM {VLLM.installed()}, {where}")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for name in chosen:
            begin = time.perf_counter()
            print(f"{name}: {SECTIONS[name].__doc__}", flush=True)
            try:
                SECTIONS[name](bench)
            except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                check(f"{name}: {error}", False)
            print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"{len(FAILED)} checks failed" if FAILED else "all checks hold")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
