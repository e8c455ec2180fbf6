"""Time to first token of SGLang servers on two CPU ranks, with its own load generator.

    make .venv-sglang/.ready
    .venv-sglang/bin/python benchmarks/serve_sglang.py

Three servers of a random Qwen3-MoE, each with data-parallel attention over two ranks of one core:

    stock      SGLang's own expert parallelism: every rank gets the tokens of all ranks
    none       rows dispatched by the plug-in, without replicas
    ultraep    the plug-in with its default settings

`sglang.bench_serving` sends the same prompts to one server after the other in every round, as a
Poisson process below the throughput of `stock`, and then all at once. Servers that wait are stopped
(SIGSTOP), because they poll. `busiest` is the processor time of the rank that computes longest;
`pays from` are the rows from which a replica pays, as the plug-in has measured. Two models differ
in their routers only: one prefers the experts of the first rank, the other both ranks equally.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from unittest.mock import Mock, patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integrations"))
from harness import Line, Metric, Report, Samples, Values, comma_list, options_parser
from safetensors.torch import load_file, save_file
from servers import Server, make_model
from sglang_check import Bench, expert_parallel
from timing import print_progress

from ultraep.supported import SGLANG

SIZES = {"hidden_size": 512, "moe_intermediate_size": 1536, "num_hidden_layers": 2}
ROUNDS = 3


@dataclass(frozen=True)
class Load:
    """The prompts that a server gets.

    chunk: tokens of a prefill chunk, of both ranks.
    tokens, least: length of the longest prompt, and of the shortest one in proportion to it.
    """

    chunk: int
    prompts: int
    tokens: int
    least: float


LOADS = {"short": Load(640, 32, 512, 0.125), "long": Load(8192, 16, 3072, 0.5)}
SHARE = 0.75  # of the throughput of `stock`: the rate of the Poisson process
VARIANTS: dict[str, dict[str, str] | None] = {
    "stock": None,
    "none": {"ULTRAEP_SLOTS": "1", "ULTRAEP_POLICY": "none"},
    "ultraep": {"ULTRAEP_SLOTS": "1"},
}
P50 = Metric("first_token_p50", "ms", "p50 ms", ".1f", geometric_mean)
P99 = Metric("first_token_p99", "ms", "p99 ms", ".1f", geometric_mean)
SPEED = Metric("throughput_tokens", "tokens/s", "tokens/s", ".0f", geometric_mean)
OVER_STOCK = Metric("first_token_gain_over_stock", "ratio", "to stock", ".3f", geometric_mean)
OVER_NONE = Metric("first_token_gain_over_none", "ratio", "to none", ".3f", geometric_mean)
FASTER = Metric("throughput_gain_over_none", "ratio", "to none", ".3f", geometric_mean)
BUSY = Metric("busiest_rank", "ms/token", "busiest", ".3f", geometric_mean)  # its processor
LESS_BUSY = Metric("busiest_rank_gain_over_none", "ratio", "to none", ".3f", geometric_mean)
BEFORE = Metric("imbalance_before", "ratio", "before", ".3f")
AFTER = Metric("imbalance_after", "ratio", "after", ".3f")
PAYS = Metric("rows_to_pay", "rows", "pays from", ".0f")


def write_model(folder: Path, *, even: bool) -> None:
    """Write a model whose router prefers the first rank, or both ranks equally."""
    make_model("Qwen3Moe", folder, max_position_embeddings=4096, **SIZES)
    if even:
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if name.endswith("mlp.gate.weight"):
                first, second = tensor.chunk(2)
                second.copy_(-first)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class Sglang:
    """Servers of SGLang, and its load generator."""

    library, title = SGLANG, "SGLang, Qwen3-MoE, two CPU ranks"
    rank = "sglang::scheduler"  # in the command of a rank

    def serving(self, folder: Path, model: str, size: Load, name: str) -> Any:
        """Return the context of a server."""
        options = [*expert_parallel(2), "--enable-metrics"]
        if name == "stock":  # its default for sums needs NCCL
            options = [*options[:-5], "--enable-metrics", "--boundary-reduction", "ar"]
        options += ["--chunked-prefill-size", str(size.chunk), "--disable-radix-cache"]
        return Bench(folder).serving(model, *options, variables=VARIANTS[name])

    def send(self, size: Load, server: Server, folder: Path, rate: float, seed: int) -> Any:
        """Return what `sglang.bench_serving` measures on a server."""
        sys.modules["datasets"] = Mock()  # imported for other loads
        from sglang.benchmark import serving

        output = folder / "load.jsonl"
        output.unlink(missing_ok=True)
        options = f"""bench_serving --backend sglang --host 127.0.0.1 --port {server.port}
            --dataset-name random-ids --tokenize-prompt --random-input-len {size.tokens}
            --random-range-ratio {size.least} --random-output-len 1 --num-prompts {size.prompts}
            --seed {seed} --request-rate {rate} --output-file {output} --disable-tqdm"""
        with patch.object(sys, "argv", options.split()):
            serving.cli_main()
        return json.loads(output.read_text())


def send(
    engine: Any, size: Load, server: Server, folder: Path, rate: float, seed: int
) -> dict[str, Any]:
    """Return what the load generator measures on a server, the only one that runs."""
    os.killpg(server.process.pid, signal.SIGCONT)
    before = processor_times(server, engine.rank)
    with (folder / "load.log").open("a") as log, redirect_stdout(log):
        figures: dict[str, Any] = engine.send(size, server, folder, rate, seed)
    os.killpg(server.process.pid, signal.SIGSTOP)
    ranks = zip(before, processor_times(server, engine.rank), strict=True)
    figures["processor_time"] = max(end - begin for begin, end in ranks)
    assert figures["completed"] == size.prompts, figures
    return figures


def processor_times(server: Server, rank: str) -> list[float]:
    """Return the seconds that each rank of a server has computed."""
    stats = [Path(f"/proc/{process}/stat") for process in server.processes(rank)]
    fields = [stat.read_text().rsplit(")")[-1].split() for stat in stats]
    return [(int(each[11]) + int(each[12])) / os.sysconf("SC_CLK_TCK") for each in fields]


def start(engine: Any, folder: Path, stack: ExitStack, model: str, size: Load, name: str) -> Server:
    """Start a server, and stop its processes until its turn."""
    print_progress(f"{model}: start {name}")
    logs = folder / f"{name}-{size.chunk}"
    logs.mkdir()
    (logs / model).symlink_to(folder / model)
    server: Server = stack.enter_context(engine.serving(logs, model, size, name))
    stack.callback(os.killpg, server.process.pid, signal.SIGCONT)
    os.killpg(server.process.pid, signal.SIGSTOP)
    return server


def measure(engine: Any, folder: Path, model: str, prompts: str, rounds: int) -> list[Line]:
    """Run all variants in turns; return a line for each kind of arrivals and variant."""
    samples, size = Samples(), LOADS[prompts]
    load = partial(send, engine, size)
    with ExitStack() as stack:
        servers = {name: start(engine, folder, stack, model, size, name) for name in VARIANTS}
        warm = [load(server, folder, float("inf"), 0) for server in servers.values()]
        loads = {"Poisson": SHARE * warm[0]["request_throughput"], "all at once": float("inf")}
        for number in range(1, rounds + 1):
            for arrivals, rate in loads.items():
                print_progress(f"{model}, {prompts}: round {number}, {arrivals}")
                order = list(servers) if number % 2 else list(reversed(servers))
                results = {name: load(servers[name], folder, rate, number) for name in order}
                for name in servers:
                    case = {"routing": model, "prompts": prompts, "arrivals": arrivals}
                    case["server"] = name
                    samples.add(case, values(results, name, polls=arrivals == "Poisson"))
        for server in servers.values():
            os.killpg(server.process.pid, signal.SIGCONT)
        imbalance = {name: imbalance_of(servers[name]) for name in ("none", "ultraep")}
        imbalance["ultraep"][PAYS] = rows_to_pay(servers["ultraep"])
    return [
        Line(line.case, {**line.values, **imbalance.get(str(line.case["server"]), {})})
        for line in samples.lines()
    ]


def values(results: dict[str, dict[str, Any]], name: str, *, polls: bool) -> Values:
    """Return the figures of a server, and their ratios to other servers of the same round.

    polls: whether ranks also wait for prompts; the time that they compute is then unknown.
    """
    first = {server: figures["median_ttft_ms"] for server, figures in results.items()}
    speed = {server: figures["input_throughput"] for server, figures in results.items()}
    busy = {server: figures["processor_time"] for server, figures in results.items()}
    return {
        P50: first[name],
        P99: results[name]["p99_ttft_ms"],
        OVER_STOCK: first["stock"] / first[name],
        OVER_NONE: first["none"] / first[name],
        SPEED: speed[name],
        FASTER: speed[name] / speed["none"],
        BUSY: None if polls else busy[name] / results[name]["total_input_tokens"] * 1e3,
        LESS_BUSY: None if polls else busy["none"] / busy[name],
    }


def imbalance_of(server: Server) -> dict[Metric, float]:
    """Return the mean imbalance before and after balancing, of batches that were planned."""
    metrics, means = server.metrics(), {}
    planned = any('policy="ultraep"}' in key for key in metrics)
    policy = 'policy="ultraep"}' if planned else 'policy="none"}'
    for metric in (BEFORE, AFTER):
        name = f"ultraep_{metric.name}"
        means[metric] = metrics[f"{name}_sum{{{policy}"] / metrics[f"{name}_count{{{policy}"]
    return means


def rows_to_pay(server: Server) -> float:
    """Return the number of rows from which a replica pays, as the server has logged."""
    (rows,) = re.findall(r"a replica pays from ([\d,]+) rows", server.log.read_text())
    return float(rows.replace(",", ""))


def main(engine: Any, doc: str | None) -> None:
    """Measure both models with both loads and print a table for each."""
    parser = options_parser(doc)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each model")
    for name, known in (("routing", ("skewed", "even")), ("prompts", tuple(LOADS))):
        parser.add_argument(f"--{name}", type=comma_list(known), default=known)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end
    report = Report(Path(sys.argv[0]).stem, sys.argv)
    report.versions[Path(sys.argv[0]).stem.removeprefix("serve_")] = str(engine.library.installed())
    report.header()
    for model, prompts in product(options.routing, options.prompts):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_model(folder / model, even=model == "even")
            report.add(engine.title, measure(engine, folder, model, prompts, options.rounds))
            report.write(options.json)


if __name__ == "__main__":
    main(Sglang(), __doc__)
