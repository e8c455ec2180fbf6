"""Tiny models, servers of several ranks, and the runner of the checks of vLLM and SGLang."""

import argparse
import contextlib
import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

VOCABULARY = 512
START_LIMIT, ANSWER_LIMIT = 600.0, 120.0  # seconds
FAILED: list[str] = []
COMMON = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "Glm4Moe": {  # a dense layer, a shared expert, corrected scores, uneven experts per rank
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "n_routed_experts": 10,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
    "Olmoe": {"intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
    "GptOss": {  # experts with biases
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def make_model(family: str, folder: Path, **changes: Any) -> Path:
    """Write a random model and a tokenizer whose words are numbers; return the folder.

    changes: replace values of the configuration.
    """
    import tokenizers
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family], **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.2)
            if name.endswith(("gate.weight", "router.weight")):
                parameter[: len(parameter) // 2] *= 4  # the first ranks get more rows
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


class Server:
    """A running server on this machine."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a JSON request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT) as reply:
            return json.load(reply)

    def complete(self, prompt: list[int]) -> list[int]:
        """Return eight greedy tokens."""
        raise NotImplementedError

    def complete_all(self, prompts: list[list[int]], clients: int) -> list[list[int]]:
        """Return the answers to all prompts, sent by several clients at the same time."""
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(self.complete, prompts))

    def metrics(self) -> dict[str, float]:
        """Return the values of the plug-in on the metrics page."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as reply:
            page = reply.read().decode()
        lines = [line for line in page.splitlines() if line.startswith("ultraep_")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def processes(self, name: str) -> list[int]:
        """Return the ids of the server's processes with this in their command."""
        command = ["ps", "-o", "pid=,args=", "-g", str(self.process.pid)]
        listing = subprocess.run(command, capture_output=True, text=True).stdout
        lines = [line.split(None, 1) for line in listing.splitlines()]
        return [int(pid) for pid, text in lines if name in text]

    def ends(self, limit: float = 60.0) -> bool:
        """Return whether all processes of the server end within `limit` seconds."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            self.process.poll()
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.5)
        return False


def free_port(*others: int) -> int:
    """Return a free port, below those that the system hands out; so are the `others` above it."""
    candidates = random.sample(range(10_000, 30_000), 500)
    return next(port for port in candidates if all(_is_free(port + n) for n in (0, *others)))


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def started(
    kind: type[Server], command: list[str], environment: dict[str, str], port: int, log: Path
) -> Iterator[Any]:
    """Start a server and wait until it answers; end all of its processes afterwards."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = kind(process, port, log)
    try:
        _wait_for(server)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        if not server.ends():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise AssertionError("the server left processes behind")


def _wait_for(server: Server) -> None:
    until = time.monotonic() + START_LIMIT
    while time.monotonic() < until:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended:\n{server.log.read_text()[-3000:]}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5).close()
            return
        time.sleep(1)
    raise AssertionError(f"no answer in {START_LIMIT:.0f} s:\n{server.log.read_text()[-3000:]}")


def logged_by_plugin(log: str) -> list[str]:
    """Return the messages of the plug-in. Paths in a log may contain its name, too."""
    return re.findall(r"ultraep: (?:no|\d+ of \d+) MoE layers? balanced.*", log)


def check(claim: str, holds: bool, figure: object = "") -> None:
    """Print a line; store the claim if it does not hold."""
    text = f"{claim}: {figure}" if figure != "" else claim
    print(f"  {'ok    ' if holds else 'FAILED'} {text}", flush=True)
    if not holds:
        FAILED.append(claim)


def check_log(server: Server) -> None:
    """Check that the plug-in logged one line."""
    lines = logged_by_plugin(server.log.read_text())
    check("the log has one line", len(lines) == 1, lines[0] if lines else "none")


def check_measured(server: Server) -> None:
    """Check that the plug-in logged once which batches are large enough, by measured rates."""
    lines = re.findall(r"ultraep: a replica pays from .*", server.log.read_text())
    check("the log says when a replica pays", len(lines) == 1, lines[0] if lines else "none")


def check_metrics(server: Server, *, small_batches: bool) -> dict[str, float]:
    """Check and return the figures of the metrics page.

    small_batches: whether some batches are too small to balance.
    """
    metrics = server.metrics()
    mean = {
        when: metrics[f'ultraep_imbalance_{when}_sum{{policy="ultraep"}}']
        / metrics[f'ultraep_imbalance_{when}_count{{policy="ultraep"}}']
        for when in ("before", "after")
    }
    figure = f"{mean['before']:.3f} -> {mean['after']:.3f}"
    check("metrics: imbalance", mean["before"] > mean["after"] >= 1, figure)
    sent, planned = metrics["ultraep_copies_sent_total"], metrics["ultraep_copies_planned_total"]
    check("metrics: all replicas are sent", 0 < sent == planned, f"{sent:.0f} of {planned:.0f}")
    nbytes = metrics["ultraep_weights_sent_bytes_total"]
    seconds = metrics['ultraep_stage_seconds_total{stage="experts"}']
    check("metrics: bytes and seconds", nbytes > 0 and seconds > 0)
    skipped = metrics.get('ultraep_imbalance_before_count{policy="none"}', 0)
    check("metrics: small batches", (skipped > 0) == small_batches, f"{skipped:.0f}")
    return metrics


def run_sections(
    sections: dict[str, Callable[[Any], None]],
    make_bench: Callable[[Path], Any],
    title: str,
    doc: str | None,
) -> None:
    """Run some or all sections in a temporary folder, and exit with code 1 if a check failed."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--only", default=",".join(sections), help="comma-separated sections")
    names = parser.parse_args().only.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end
    print(f"{title}, {platform.machine()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        bench = make_bench(Path(folder))
        for name in names:
            begin = time.perf_counter()
            print(f"{name}: {sections[name].__doc__}", flush=True)
            try:
                sections[name](bench)
            except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                check(f"{name}: {error}", False)
            print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"{len(FAILED)} checks failed" if FAILED else "all checks hold")
    sys.exit(bool(FAILED))
