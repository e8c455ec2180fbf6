"""Tiny models for vLLM, a reference engine in one process, and servers of several ranks."""

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

VOCABULARY = 512
MAX_PROMPT, MAX_BATCH = 256, 64  # tokens; the batch is per rank
START_LIMIT, ANSWER_LIMIT = 600.0, 120.0  # seconds
ENVIRONMENT = {
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
    "GptOss": {  # experts with biases
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def make_model(family: str, folder: Path) -> Path:
    """Write a random model and a tokenizer whose words are numbers; return the folder."""
    import tokenizers
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family]})
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


def make_prompts() -> list[list[int]]:
    """Return prompts of many lengths, some longer than a batch, two with a common prefix."""
    lengths = (1, 2, 7, 30, 65, 130, 200)
    prompts = [[(7 * i + 11 * n) % 500 + 3 for i in range(n)] for n in lengths]
    prefix = [(5 * i) % 500 + 3 for i in range(90)]
    return [*prompts, [*prefix, 9, 8, 7], [*prefix, 200], [17] * 150]


def reference_answers(model: Path, dtype: str, prompts: list[list[int]], **options: Any) -> Any:
    """Run one engine in its own process.

    Return greedy tokens, their lead in log probability over the second best, and the log.
    """
    job = {"model": str(model), "dtype": dtype, "prompts": prompts, "options": options}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(job)],
        env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=START_LIMIT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    match = re.search(r"^TOKENS (.*)$", done.stdout, re.MULTILINE)
    assert match, done.stdout
    tokens, leads = json.loads(match[1])
    return tokens, leads, done.stdout + done.stderr


def logged_by_plugin(log: str) -> list[str]:
    """Return the messages of the plug-in. Paths in a log may contain its name, too."""
    return re.findall(r"ultraep: (?:no|\d+ of \d+) MoE layers? balanced.*", log)


def answer(job: dict[str, Any]) -> None:
    """Answer the prompts of a job; runs in the process of `reference_answers`."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=MAX_PROMPT,
        max_num_seqs=4,
        max_num_batched_tokens=MAX_PROMPT,
        enable_prefix_caching=False,
        **{"enforce_eager": True, **job["options"]},
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    answers = [result.outputs[0] for result in engine.generate(prompts, params)]
    tokens = [list(answer.token_ids) for answer in answers]
    leads = [[_lead(step.values()) for step in answer.logprobs] for answer in answers]
    print("TOKENS", json.dumps([tokens, leads]), flush=True)


def _lead(candidates: Any) -> float:
    best, second = sorted((token.logprob for token in candidates), reverse=True)[:2]
    return best - second


class Server:
    """A running `vllm serve` on this machine."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def complete(self, prompt: list[int]) -> list[int]:
        """Return eight greedy tokens of the OpenAI endpoint."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        body["ignore_eos"] = True
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT) as reply:
            text = json.load(reply)["choices"][0]["text"]
        return [int(word) for word in text.split()]

    def complete_all(self, prompts: list[list[int]], clients: int) -> list[list[int]]:
        """Return the answers to all prompts, sent by several clients at the same time."""
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(self.complete, prompts))

    def metrics(self) -> dict[str, float]:
        """Return the values of the plug-in on the metrics page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as reply:
            page = reply.read().decode()
        lines = [line for line in page.splitlines() if line.startswith("ultraep_")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def workers(self) -> list[int]:
        """Return the ids of the worker processes."""
        command = ["ps", "-o", "pid=,args=", "-g", str(self.process.pid)]
        listing = subprocess.run(command, capture_output=True, text=True).stdout
        lines = [line.split(None, 1) for line in listing.splitlines()]
        return [int(pid) for pid, name in lines if "Worker" in name]

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


@contextlib.contextmanager
def serving(
    model: Path, log: Path, *options: str, variables: dict[str, str] | None = None
) -> Iterator[Server]:
    """Start a server and wait until it answers; end all of its processes afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    command += ["--enable-expert-parallel", "--max-model-len", str(MAX_PROMPT)]
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", str(MAX_BATCH), *options]
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, **(variables or {})},
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


if __name__ == "__main__":
    answer(json.loads(sys.argv[1]))
