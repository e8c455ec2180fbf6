"""Time to first token of vLLM servers on two CPU ranks, with its own load generator.

    make .venv-vllm/.ready
    .venv-vllm/bin/python benchmarks/serve_vllm.py

The models, prompts, turns and figures are those of `serve_sglang.py`. The servers differ:

    stock      tensor parallelism; on CPUs, vLLM's own expert parallelism ends with an error
    none       data-parallel ranks, rows dispatched by the plug-in, without replicas
    ultraep    the same with default settings
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from serve_sglang import VARIANTS, Load, main
from servers import Server
from vllm_engines import serving

from ultraep.supported import VLLM


class Vllm:
    """Servers of vLLM, and its load generator."""

    library, title = VLLM, "vLLM, Qwen3-MoE, two CPU ranks"
    rank = "Worker"  # in the command of a rank

    def serving(self, folder: Path, model: str, size: Load, name: str) -> Any:
        """Return the context of a server."""
        ranks, chunk = "--data-parallel-size 2", size.chunk // 2
        if name == "stock":
            ranks, chunk = "--tensor-parallel-size 2 --no-enable-expert-parallel", size.chunk
        options = f"""{ranks} --dtype float32 --max-num-batched-tokens {chunk}
            --max-model-len 4096 --max-num-seqs 64 --api-server-count 1
            --no-enable-prefix-caching"""
        counters = folder / "counters"
        counters.mkdir()
        variables = (VARIANTS[name] or {}) | {"PROMETHEUS_MULTIPROC_DIR": str(counters)}
        variables |= {"VLLM_CACHE_ROOT": str(folder / "cache")}
        return serving(folder / model, folder / "server.log", *options.split(), variables=variables)

    def send(self, size: Load, server: Server, folder: Path, rate: float, seed: int) -> Any:
        """Return what `vllm bench serve` measures on a server."""
        from vllm.benchmarks import serve

        parser, middle = argparse.ArgumentParser(), (1 + size.least) / 2
        serve.add_cli_args(parser)
        (model,) = folder.glob("*/config.json")
        options = f"""--backend openai --port {server.port} --model {model.parent}
            --served-model-name tiny --dataset-name random --random-output-len 1
            --random-input-len {round(size.tokens * middle)} --num-prompts {size.prompts}
            --random-range-ratio {(1 - size.least) / 2 / middle:.3f} --seed {seed}
            --request-rate {rate} --disable-tqdm --metric-percentiles 99 --temperature 0"""
        figures = serve.main(parser.parse_args(options.split()))
        return {**figures, "input_throughput": figures["total_input_tokens"] / figures["duration"]}


if __name__ == "__main__":
    main(Vllm(), __doc__)
