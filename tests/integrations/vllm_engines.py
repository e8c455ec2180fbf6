"""A reference engine of vLLM in one process, and its servers of several ranks."""

import json
import os
import re
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from servers import START_LIMIT, Server, free_port, started

MAX_PROMPT, MAX_BATCH = 256, 64  # tokens; the batch is per rank
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


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


class VllmServer(Server):
    """A running `vllm serve`."""

    def complete(self, prompt: list[int]) -> list[int]:
        """Return eight greedy tokens of the OpenAI endpoint."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        text = self.post("v1/completions", body | {"ignore_eos": True})["choices"][0]["text"]
        return [int(word) for word in text.split()]

    def workers(self) -> list[int]:
        """Return the ids of the worker processes."""
        return self.processes("Worker")


def serving(
    model: Path, log: Path, *options: str, variables: dict[str, str] | None = None
) -> AbstractContextManager[VllmServer]:
    """Start a server and wait until it answers; end all of its processes afterwards."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    command += ["--enable-expert-parallel", "--max-model-len", str(MAX_PROMPT)]
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", str(MAX_BATCH), *options]
    return started(VllmServer, command, ENVIRONMENT | (variables or {}), port, log)


if __name__ == "__main__":
    answer(json.loads(sys.argv[1]))
