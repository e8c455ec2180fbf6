"""Check the plug-in in real vLLM servers (`make test-vllm`; CI does not run it).

Prints a line for every check and exits with code 1 if one fails. Needs an environment with vLLM.
"""

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

from servers import (
    check,
    check_log,
    check_measured,
    check_metrics,
    logged_by_plugin,
    make_model,
    run_sections,
)
from vllm_engines import VllmServer as Server
from vllm_engines import make_prompts, reference_answers, serving

import ultraep
from ultraep.supported import VLLM

PROMPTS = make_prompts()
# What vLLM logs on a rank when it has stored compiled code, or read it.
COMPILED = "saved AOT compiled function|Directly load AOT compilation"
TIE = 0.05  # lead in log probability below which half precision may choose either token


class Bench:
    """Models and reference answers that several sections use, created once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reference: dict[tuple[str, str], tuple[list[list[int]], list[list[float]]]] = {}
        os.environ["VLLM_CACHE_ROOT"] = str(folder / "cache")  # compiled code

    def model(self, family: str) -> Path:
        """Return the folder of a model."""
        folder = self.folder / family
        return folder if folder.exists() else make_model(family, folder)

    def reference(self, family: str, dtype: str) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens and leads of one process without settings of the plug-in."""
        if (family, dtype) not in self._reference:
            tokens, leads, log = reference_answers(self.model(family), dtype, PROMPTS)
            check(f"{family} {dtype}, one process: no log line", not logged_by_plugin(log))
            self._reference[family, dtype] = tokens, leads
        return self._reference[family, dtype]

    def serving(
        self, family: str, *options: str, variables: dict[str, str] | None = None
    ) -> AbstractContextManager[Server]:
        """Start a server; its log is in the folder of the bench."""
        number = len(list(self.folder.glob("*.log")))
        log = self.folder / f"server-{number}.log"
        return serving(self.model(family), log, *options, variables=variables)


def compare(
    server: Server, expected: list[list[int]], leads: list[list[float]] | None = None
) -> None:
    """Compare greedy tokens: several clients, again with cached prefixes, and one client.

    leads: allow another token where the lead is below TIE; later tokens are then not compared.
    """
    for name, clients in (("6 clients", 6), ("cached prefixes", 6), ("one client", 1)):
        answers, equal, ties = server.complete_all(PROMPTS, clients), 0, 0
        for number, (answer, tokens) in enumerate(zip(answers, expected, strict=True)):
            same = [a == b for a, b in zip(answer, tokens, strict=True)]
            until = same.index(False) if False in same else len(same)
            equal += until
            if until < len(same) and leads is not None and leads[number][until] < TIE:
                ties += len(same) - until
        total = sum(map(len, expected))
        figure = f"{equal}/{total}" + f", {ties} after a tie" * (ties > 0)
        check(f"tokens equal the tokens of one process, {name}", equal + ties == total, figure)


def check_compiled(server: Server) -> None:
    """Check that every rank runs compiled code, which allows no graph break."""
    lines = [line for line in server.log.read_text().splitlines() if re.search(COMPILED, line)]
    ranks = {line.split(" pid=")[0] for line in lines}
    check("all ranks run compiled code", len(ranks) == len(server.workers()), len(ranks))


def two_ranks(bench: Bench) -> None:
    """Qwen3-MoE, float32, DP2, compiled, settings in the environment; a rank that dies; caches."""
    expected, _ = bench.reference("Qwen3Moe", "float32")
    variables = {"ULTRAEP_SLOTS": "1", "ULTRAEP_MIN_ROWS": "16"}  # batches are tiny
    options = "--data-parallel-size", "2", "--dtype", "float32"
    with bench.serving("Qwen3Moe", *options, variables=variables) as server:
        check_compiled(server)
        compare(server, expected)
        check_log(server)
        check_metrics(server, small_batches=True)
        begin = time.perf_counter()
        answers = server.complete_all(PROMPTS * 6, 8)
        seconds = time.perf_counter() - begin
        check("60 requests by 8 clients", answers == expected * 6, f"{seconds:.1f} s")
        os.kill(server.workers()[1], signal.SIGKILL)
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            server.complete(PROMPTS[3])
        check("all processes end after a rank died", server.ends(90))
    speculation = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}'
    print("  the same server, again")
    with bench.serving("Qwen3Moe", *options, variables=variables) as server:
        compare(server, expected)
        check_log(server)
    print("  default settings, ngram")
    options += "--speculative-config", speculation
    with bench.serving("Qwen3Moe", *options, variables={"ULTRAEP_SLOTS": "1"}) as server:
        compare(server, expected)
        check_log(server)
        check_measured(server)


def methods(bench: Bench) -> None:
    """Replicas of quantisation methods, CUDA graphs, recorded routes: one process."""
    here = Path(__file__).parent / "vllm_methods.py"
    done = subprocess.run([sys.executable, here], capture_output=True, text=True, timeout=600)
    for line in done.stdout.splitlines():
        if line.startswith("CASE "):
            case = json.loads(line.removeprefix("CASE "))
            figures = ", ".join(f"{v} {k}" for k, v in case.items() if isinstance(v, int))
            check(case["name"], True, f"{case.get('kernel', '')} {figures}".strip())
    check("all cases hold", done.returncode == 0, done.stderr[-1500:] if done.returncode else "")


def four_ranks(bench: Bench) -> None:
    """GLM-4-MoE (10 experts on 4 ranks, a shared expert), float32, DP4, --additional-config."""
    expected, _ = bench.reference("Glm4Moe", "float32")
    options = ["--data-parallel-size", "4", "--dtype", "float32", "--api-server-count", "1"]
    options += ["--additional-config", '{"ultraep": {"slots": 2, "min_rows": 1}}']
    with tempfile.TemporaryDirectory() as folder:
        variables = {"PROMETHEUS_MULTIPROC_DIR": folder}
        with bench.serving("Glm4Moe", *options, variables=variables) as server:
            compare(server, expected)
            check_log(server)
            check_metrics(server, small_batches=False)


def half_precision(bench: Bench) -> None:
    """Qwen3-MoE, DP2, bfloat16, or float16 on a processor without bfloat16; a trace."""
    dtype = "bfloat16"
    if lacks_bfloat16():
        print("  skipped bfloat16: vLLM needs instructions that this processor lacks")
        dtype = "float16"
    expected, leads = bench.reference("Qwen3Moe", dtype)
    options = "--data-parallel-size", "2", "--dtype", dtype, "--api-server-count", "1"
    options += ("--enforce-eager",)
    trace = bench.folder / "trace"
    variables = {"ULTRAEP_SLOTS": "1", "ULTRAEP_MIN_ROWS": "1"}
    variables["ULTRAEP_RECORD"] = str(trace)
    with bench.serving("Qwen3Moe", *options, variables=variables) as server:
        compare(server, expected, leads)
        check_log(server)
        time.sleep(3)  # for the trace: vLLM kills its workers
    records = len(ultraep.read_trace(trace))
    check("a trace of all microbatches", records > 0, f"{records} records")


def biases(bench: Bench) -> None:
    """gpt-oss, whose experts have biases, float32, DP2, two slots per rank."""
    expected, _ = bench.reference("GptOss", "float32")
    options = "--data-parallel-size", "2", "--dtype", "float32", "--api-server-count", "1"
    trace = bench.folder / "two-slots"
    variables = {"ULTRAEP_SLOTS": "2", "ULTRAEP_MIN_ROWS": "1", "ULTRAEP_RECORD": str(trace)}
    with bench.serving("GptOss", *options, variables=variables) as server:
        compare(server, expected)
        check_log(server)
        time.sleep(3)  # for the trace, as above
    second = int((ultraep.read_trace(trace).copies[:, 2] == 1).sum())
    check("replicas in second slots", second > 0, second)


def refused(bench: Bench) -> None:
    """Compiled tensor-parallel ranks are not balanced, and the log says why; an invalid setting."""
    expected, _ = bench.reference("Qwen3Moe", "float32")
    model = bench.model("Qwen3Moe")
    with mock.patch.dict(os.environ, ULTRAEP_SLOTS="1"):
        tokens, _, log = reference_answers(
            model, "float32", PROMPTS, tensor_parallel_size=2, enforce_eager=False
        )
    lines = [line.split("] ", 1)[-1] for line in log.splitlines() if "ultraep: 0 of" in line]
    check("the log says why TP2 is not balanced", len(lines) == 1, lines[0] if lines else "none")
    check("its tokens equal the tokens of one process", tokens == expected)
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model)]
    environment = {**os.environ, "ULTRAEP_SLOTS": "many"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    message = "ULTRAEP_SLOTS must be an integer, got 'many'"
    stopped = done.returncode != 0 and message in done.stderr
    check("an invalid setting stops the start", stopped, message)


def lacks_bfloat16() -> bool:
    """Return whether this Arm processor lacks instructions that vLLM's kernels need."""
    if platform.machine() != "aarch64":
        return False
    return " bf16" not in Path("/proc/cpuinfo").read_text()


SECTIONS: dict[str, Callable[[Bench], None]] = {
    run.__name__: run for run in (methods, two_ranks, four_ranks, half_precision, biases, refused)
}


if __name__ == "__main__":
    title = f"ultraep {ultraep.__version__} in vLLM {VLLM.installed()}"
    run_sections(SECTIONS, Bench, title, __doc__)
