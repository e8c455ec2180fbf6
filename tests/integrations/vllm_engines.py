"""Tiny models for vLLM, one engine that answers alone, and servers of several ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__)
VOCABULARY, LONGEST, BUDGET = 512, 256, 64  # tokens of a prompt at most, and of a batch on a rank
START = 600.0  # seconds for a server to answer; on two cores most of it is importing
PATIENCE = 120.0  # for an answer
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
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
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "Glm4Moe": {  # dense, then experts: a shared one, corrected scores, a number that is uneven
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
    "GptOss": {  # with biases in the experts
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def make_model(kind: str, folder: Path) -> Path:
    """A random model, and a tokenizer whose words are numbers."""
    import tokenizers
    import torch
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **KINDS[kind]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.2)
            if name.endswith(("gate.weight", "router.weight")):
                parameter[: len(parameter) // 2] *= 4  # the first ranks have more to do
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


def make_prompts() -> list[list[int]]:
    """Other lengths, some longer than a batch, some with a beginning that others have too."""
    shared = [(5 * i) % 500 + 3 for i in range(90)]
    told = [[(7 * i + 11 * n) % 500 + 3 for i in range(n)] for n in (1, 2, 7, 30, 65, 130, 200)]
    return [*told, [*shared, 9, 8, 7], [*shared, 200], [17] * 150]


def answers_alone(model: Path, dtype: str, prompts: list[list[int]], **options: Any) -> Any:
    """Greedy tokens of one engine in a process of its own, how far ahead of the second best each
    of them was, and what it logged.
    """
    job = {"model": str(model), "dtype": dtype, "prompts": prompts, "options": options}
    environment = {**os.environ, **QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, str(HERE), json.dumps(job)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=START,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = re.search(r"^TOKENS (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    tokens, ahead = json.loads(found[1])
    return tokens, ahead, done.stdout + done.stderr


def logged_by_plugin(log: str) -> list[str]:
    """The messages of the plug-in; paths in a log may hold its name, too."""
    return re.findall(r"ultraep (?:\d\S* )?balances .*", log)


def answer(job: dict[str, Any]) -> None:
    """In that process."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=LONGEST,
        max_num_seqs=4,
        max_num_batched_tokens=LONGEST,
        enable_prefix_caching=False,
        **job["options"],
    )
    asked = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    found = [one.outputs[0] for one in engine.generate(asked, params)]
    tokens = [list(one.token_ids) for one in found]
    ahead = [[_ahead(step.values()) for step in one.logprobs] for one in found]
    print("TOKENS", json.dumps([tokens, ahead]), flush=True)


def _ahead(two: Any) -> float:
    best, second = sorted((one.logprob for one in two), reverse=True)[:2]
    return best - second


class Server:
    """`vllm serve` on this machine, with the prompts of several clients at the same time."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def complete(self, prompt: list[int], tokens: int = 8) -> list[int]:
        """Greedy tokens, as the OpenAI endpoint tells them."""
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body = json.dumps(asked | {"ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            body,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            text = json.load(reply)["choices"][0]["text"]
        return [int(word) for word in text.split()]

    def complete_all(self, prompts: list[list[int]], clients: int) -> list[list[int]]:
        """The answers to all prompts, asked by so many clients at the same time."""
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(self.complete, prompts))

    def metrics(self) -> dict[str, float]:
        """Our numbers on the page of metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as reply:
            page = reply.read().decode()
        lines = [line for line in page.splitlines() if line.startswith("ultraep_")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def said(self) -> list[str]:
        """What the plug-in logged."""
        return logged_by_plugin(self.log.read_text())

    def workers(self) -> list[int]:
        """Processes that compute."""
        told = subprocess.run(
            ["ps", "-o", "pid=,args=", "-g", str(self.process.pid)], capture_output=True, text=True
        )
        lines = [line.split(None, 1) for line in told.stdout.splitlines()]
        return [int(pid) for pid, name in lines if "Worker" in name]

    def is_gone(self, patience: float = 60.0) -> bool:
        """Whether all of its processes end in time."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            self.process.poll()
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.5)
        return False


@contextlib.contextmanager
def serving(
    model: Path, log: Path, *options: str, variables: dict[str, str] | None = None
) -> Iterator[Server]:
    """A server that answers; all of its processes are gone afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    command += ["--enable-expert-parallel", "--enforce-eager", "--max-model-len", str(LONGEST)]
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", str(BUDGET), *options]
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, **QUIET, **(variables or {})},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, port, log)
    try:
        _wait_for(server)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        if not server.is_gone():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise AssertionError("the server left processes behind")


def _wait_for(server: Server) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended:\n{server.log.read_text()[-3000:]}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5).close()
            return
        time.sleep(1)
    raise AssertionError(f"no answer in {START:.0f} s:\n{server.log.read_text()[-3000:]}")


if __name__ == "__main__":
    answer(json.loads(sys.argv[1]))
