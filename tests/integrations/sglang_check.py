"""Check the plug-in in real SGLang servers (`make test-sglang`; CI does not run it).

Prints a line for every check and exits with code 1 if one fails. Needs an environment with SGLang.
The compiled kernels and the gaps of SGLang on CPUs come from `sglang_cpu`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import urllib.error
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

from servers import (
    Server,
    check,
    check_log,
    check_measured,
    check_metrics,
    free_port,
    logged_by_plugin,
    make_model,
    run_sections,
    started,
)

import ultraep
from ultraep.supported import SGLANG

HERE = Path(__file__).parent
CHUNK = 128  # tokens of a prefill chunk, per rank
LENGTHS = (1, 2, 7, 30, 65, 200, 517, 1024, 2000)
PROMPTS = [[(7 * i + 11 * n) % 500 + 3 for i in range(n)] for n in LENGTHS]
PREFIX = [(5 * i) % 500 + 3 for i in range(90)]
PROMPTS += [[*PREFIX, 9, 8, 7], [*PREFIX, 200], [17] * 150]
OPTIONS = """--device cpu --dtype float32 --attention-backend torch_native --random-seed 0
    --disable-overlap-schedule --max-total-tokens 16384 --context-length 4096
    --max-running-requests 16 --log-level info
    --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"""
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE / "sglang_cpu"),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Moe": ("Qwen3Moe", {}),
    "Glm4Moe": ("Glm4Moe", {"n_routed_experts": 12}),  # SGLang needs as many on each rank
    "Fp8": ("Qwen3Moe", {}),
    "Olmoe": ("Olmoe", {"num_key_value_heads": 4}),
}
BLOCK = 64  # of the FP8 scales
ON = {"ULTRAEP_SLOTS": "1", "ULTRAEP_MIN_ROWS": "16"}  # batches are tiny


class SglangServer(Server):
    """A running `sglang.launch_server`."""

    def complete(self, prompt: list[int]) -> list[int]:
        """Return eight greedy tokens."""
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        answer = self.post("generate", {"input_ids": prompt, "sampling_params": sampling})
        tokens: list[int] = answer["output_ids"]
        return tokens

    def rank(self, number: int) -> int:
        """Return the process id of a rank."""
        (process,) = self.processes(f"sglang::scheduler_DP{number}_")
        return process


def expert_parallel(ranks: int, attention: int | None = None) -> list[str]:
    """Return the options of a server that the plug-in balances."""
    options = f"--tp-size {ranks} --ep-size {ranks} --attn-dp-size {attention or ranks}"
    chunk = CHUNK * (attention or ranks)  # SGLang divides it by the ranks
    return f"{options} --moe-a2a-backend deepep --chunked-prefill-size {chunk}".split()


def quantise(folder: Path) -> None:
    """Quantise the experts of a checkpoint to FP8 with a scale for each block."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors, quantised = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            quantised[name] = tensor
            continue
        rows, columns = (size // BLOCK for size in tensor.shape)
        blocks = tensor.view(rows, BLOCK, columns, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        blocks = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        quantised[name] = blocks.view(tensor.shape)
        quantised[f"{name}_scale_inv"] = scale
    save_file(quantised, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    linear = [name.removesuffix(".weight") for name in tensors if ".experts." not in name]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": linear,
    }
    (folder / "config.json").write_text(json.dumps(config))


class Bench:
    """Models and reference answers that several sections use, created once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reference: dict[str, list[list[int]]] = {}

    def model(self, family: str) -> Path:
        """Return the folder of a model."""
        folder = self.folder / family
        if not folder.exists():
            name, changes = MODELS[family]
            make_model(name, folder, max_position_embeddings=4096, **changes)
            if family == "Fp8":
                quantise(folder)
        return folder

    def reference(self, family: str) -> list[list[int]]:
        """Return the tokens of stock SGLang on one rank."""
        if family not in self._reference:
            with self.serving(family) as server:
                self._reference[family] = server.complete_all(PROMPTS, 4)
            lines = logged_by_plugin(server.log.read_text())
            check(f"{family}, stock SGLang on one rank: no log line", not lines)
        return self._reference[family]

    def serving(
        self, family: str, *options: str, variables: dict[str, str] | None = None
    ) -> AbstractContextManager[SglangServer]:
        """Start a server; its log is in the folder of the bench."""
        port = free_port(13, *range(233, 242))  # SGLang adds these numbers to it
        command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port)]
        command += ["--model-path", str(self.model(family)), *OPTIONS.split(), *options]
        cores = "|".join(str(n % os.cpu_count()) for n in range(ranks_of(options)))
        environment = ENVIRONMENT | {"SGLANG_CPU_OMP_THREADS_BIND": cores} | (variables or {})
        log = self.folder / f"server-{len(list(self.folder.glob('*.log')))}.log"
        return started(SglangServer, command, environment, port, log)


def ranks_of(options: tuple[str, ...]) -> int:
    """Return the number of ranks of a server."""
    return int(options[options.index("--tp-size") + 1]) if "--tp-size" in options else 1


def compare(server: Server, expected: list[list[int]]) -> None:
    """Compare greedy tokens of several clients, again with cached prefixes, and of one client."""
    for name, clients in (("6 clients", 6), ("cached prefixes", 6), ("one client", 1)):
        answers = server.complete_all(PROMPTS, clients)
        pairs = zip(chain.from_iterable(answers), chain.from_iterable(expected), strict=True)
        same = [a == b for a, b in pairs]
        figure = f"{sum(same)}/{len(same)}"
        check(f"tokens equal one rank of stock SGLang, {name}", answers == expected, figure)


def check_replicas(metrics: dict[str, float]) -> None:
    """Check that enough of the batches that are large enough have replicas."""
    counts = {
        policy: metrics.get(f'ultraep_imbalance_before_count{{policy="{policy}"}}', 0)
        for policy in ("none", "ultraep")
    }
    replicated = sum(counts.values()) - metrics["ultraep_microbatches_skipped_total"]
    share = replicated / counts["ultraep"]
    check("prefill calls with replicas: at least 30 %", share >= 0.3, f"{share:.0%}")


def two_ranks(bench: Bench) -> None:
    """Qwen3-MoE, float32, DP2 x EP2; a load; a trace; a rank that dies."""
    expected, trace = bench.reference("Qwen3Moe"), bench.folder / "trace"
    variables = ON | {"ULTRAEP_RECORD": str(trace)}
    options = [*expert_parallel(2), "--enable-metrics"]
    with bench.serving("Qwen3Moe", *options, variables=variables) as server:
        compare(server, expected)
        check_log(server)
        check_replicas(check_metrics(server, small_batches=True))
        begin = time.perf_counter()
        answers = server.complete_all(PROMPTS * 5, 8)
        seconds = time.perf_counter() - begin
        check("60 requests by 8 clients", answers == expected * 5, f"{seconds:.1f} s")
        kill_a_rank(server)
    records = len(ultraep.read_trace(trace))
    check("a trace of all microbatches", records > 0, f"{records} records")


def kill_a_rank(server: SglangServer) -> None:
    """Kill a rank during a load: the server ends, and its log names the rank."""
    load = threading.Thread(target=suppressed, args=(server.complete_all, PROMPTS * 9, 8))
    load.start()
    time.sleep(3)
    os.kill(server.rank(1), signal.SIGKILL)
    check("all processes end after a rank died", server.ends(120))
    load.join()
    text = server.log.read_text()
    lines = re.findall(r"CommunicationError: .*rank 1.*", text)
    check("the log names the rank", bool(lines), lines[0][:300] if lines else text[-3000:])


def suppressed(call: Callable[..., Any], *inputs: Any) -> None:
    """Call a function whose server ends meanwhile."""
    with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError, OSError):
        call(*inputs)


def four_ranks(bench: Bench) -> None:
    """GLM-4-MoE (a shared expert, scaled gates), float32, DP4 x EP4, two slots."""
    variables = {"ULTRAEP_SLOTS": "2", "ULTRAEP_MIN_ROWS": "1"}
    balanced(bench, "Glm4Moe", *expert_parallel(4), variables=variables)


def fp8(bench: Bench) -> None:
    """Qwen3-MoE, experts in FP8 with block scales, DP2 x EP2."""
    balanced(bench, "Fp8", *expert_parallel(2), "--deepep-mode", "normal", variables=ON)


def balanced(bench: Bench, family: str, *options: str, variables: dict[str, str]) -> None:
    """Compare tokens of a balanced server; check its log, metrics and replicas."""
    expected = bench.reference(family)
    with bench.serving(family, *options, "--enable-metrics", variables=variables) as server:
        compare(server, expected)
        check_log(server)
        check_replicas(check_metrics(server, small_batches=True))


def measured(bench: Bench) -> None:
    """Qwen3-MoE, float32, DP2 x EP2, default settings: replicas if measured rates favour them."""
    expected = bench.reference("Qwen3Moe")
    variables = {"ULTRAEP_SLOTS": "1"}
    with bench.serving("Qwen3Moe", *expert_parallel(2), variables=variables) as server:
        compare(server, expected)
        check_log(server)
        check_measured(server)


def refused(bench: Bench) -> None:
    """Stock expert parallelism with the plug-in on; servers that do not start."""
    expected = bench.reference("Qwen3Moe")
    options = "--tp-size", "2", "--ep-size", "2"
    with bench.serving("Qwen3Moe", *options, variables=ON) as server:
        compare(server, expected)
        check_log(server)
    slots = {"ULTRAEP_SLOTS": "many"}
    for name, family, extra, variables, message in (
        ("an invalid setting", "Qwen3Moe", (), slots, "ULTRAEP_SLOTS must be an integer"),
        (
            "two-batch overlap",
            "Qwen3Moe",
            ("--enable-two-batch-overlap",),
            ON,
            "two-batch overlap bypasses the layer",
        ),
        (
            "a model that constructs FusedMoE directly",
            "Olmoe",
            (),
            ON,
            "ultraep: 0 of 2 MoE layers balanced: model.layers.0.mlp.experts is not a DeepEPMoE",
        ),
    ):
        text = ""
        try:
            with bench.serving(family, *expert_parallel(2), *extra, variables=variables):
                pass
        except AssertionError as error:  # SGLang has no all-to-all for CPUs
            text = max(bench.folder.glob("*.log"), key=lambda log: log.stat().st_mtime).read_text()
            text += str(error)
        lines = [line for line in text.splitlines() if message in line]
        check(f"refused by name: {name}", bool(lines), lines[0][-200:] if lines else "")


SECTIONS: dict[str, Callable[[Bench], None]] = {
    run.__name__: run for run in (two_ranks, four_ranks, fp8, measured, refused)
}


if __name__ == "__main__":
    title = f"ultraep {ultraep.__version__} in SGLang {SGLANG.installed()}"
    run_sections(SECTIONS, Bench, title, __doc__)
