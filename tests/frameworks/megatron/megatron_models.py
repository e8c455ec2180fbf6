"""Small models of Megatron-Core on gloo ranks, unmodified or balanced."""

import atexit
import functools
import os
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling small functions takes seconds

import te_on_cpu
import torch
import torch.nn.functional as F  # noqa: N812
from megatron_on_cpu import on_cpu
from ranks import RankPool, shared_pool

from ultraep import NothingToBalance

HIDDEN, EXPERTS, TOP_K, VOCABULARY, LENGTH, ROWS = 32, 8, 2, 64, 16, 2
VERSION = tuple(int(number) for number in version("megatron-core").split(".")[:2])


@functools.cache
def te_pool() -> RankPool:
    """Return processes that import Transformer Engine before Megatron-Core."""
    pool = RankPool()
    atexit.register(pool.close)
    return pool


def on_megatron(
    size: int, *, te: bool = False, **parallel: int
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn a function into a test that runs on `size` ranks, in the groups of Megatron-Core.

    te: with Transformer Engine, see `te_on_cpu.py`.   parallel: of `initialize_model_parallel`.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def test(**arguments: Any) -> list[Any] | None:
            name = body.__module__, body.__name__
            pool = te_pool() if te else shared_pool()
            run = te_run_body if te else run_body
            results = pool.run(size, run, *name, parallel, arguments)
            return results if any(result is not None for result in results) else None

        return test

    return decorate


def te_run_body(rank: int, group: Any, *args: Any) -> Any:
    te_on_cpu.install()
    with te_on_cpu.on_device():
        return run_body(rank, group, *args)


def run_body(
    rank: int, group: Any, module: str, name: str, parallel: dict[str, int], arguments: dict
) -> Any:
    """Run a test on one rank. Ignore warnings of the library; our warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="ultraep")
        warnings.simplefilter("ignore", NothingToBalance)  # some groups have one rank
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils

        with on_cpu():
            parallel_state.initialize_model_parallel(**parallel)
            random.model_parallel_cuda_manual_seed(7)
            try:
                return getattr(import_module(module), name).__wrapped__(**arguments)
            finally:
                forget_metrics(moe_utils)
                moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
                random.get_cuda_rng_tracker().reset()
                parallel_state.destroy_model_parallel()


def forget_metrics(moe_utils: Any) -> None:
    """Clear the metrics of the library, which are sized by the number of layers."""
    if hasattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"):  # until 0.17
        moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER.clear()
    else:
        from megatron.core.transformer.moe import moe_logging

        moe_logging.destroy_moe_metrics_tracker()


def seed() -> None:
    from megatron.core.tensor_parallel import random

    random.get_cuda_rng_tracker().reset()
    random.model_parallel_cuda_manual_seed(7)


def settings(**changes: Any) -> Any:
    """Return a small configuration with experts on two ranks."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    defaults = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_ffn_hidden_size": 48,
        "ffn_hidden_size": 64,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "moe_token_dispatcher_type": "allgather",
        "expert_model_parallel_size": 2,
        "use_cpu_initialization": True,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.1,
    }
    return TransformerConfig(**(defaults | changes))


def make_layer(config: Any, options: dict[str, Any] | None, *, use_te: bool = False) -> Any:
    """Return a MoE layer. options: of a balanced layer; None: the library's own layer."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module

    from ultraep.integrations.megatron import balanced

    seed()
    torch.manual_seed(11)
    spec = get_moe_module_spec(
        use_te=use_te, num_experts=config.num_moe_experts, moe_grouped_gemm=use_te
    )
    if options is not None:
        spec = balanced(spec, config, **options)
    layer = spec(config=config) if callable(spec) else build_module(spec, config=config)
    layer.set_layer_number(1)
    skew(layer)
    return layer


def make_model(config: Any, options: dict[str, Any] | None) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from ultraep.integrations.megatron import balanced

    torch.manual_seed(11 + parallel_state.get_pipeline_model_parallel_rank())
    chunks = []
    for index in range(config.virtual_pipeline_model_parallel_size or 1):
        stage = index if config.virtual_pipeline_model_parallel_size else None
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
        if options is not None:
            spec = balanced(spec, config, **options)
        position = {"ignore_virtual": False, "vp_stage": stage}
        chunks.append(
            GPTModel(
                config,
                spec,
                vocab_size=VOCABULARY,
                max_sequence_length=LENGTH,
                pre_process=parallel_state.is_pipeline_first_stage(**position),
                post_process=parallel_state.is_pipeline_last_stage(**position),
                vp_stage=stage,
            )
        )
        skew(chunks[-1])
    return chunks


@torch.no_grad()
def skew(module: torch.nn.Module) -> None:
    """Make experts of the first rank hot."""
    from megatron.core.transformer.moe.router import TopKRouter

    for router in module.modules():
        if isinstance(router, TopKRouter):
            direction = torch.linspace(-1, 1, router.weight.shape[1]).to(router.weight)
            router.weight[0] += 0.5 * direction
            router.weight[1] -= 0.5 * direction


def rows_of_rank(dtype: torch.dtype, microbatch: int = 0, width: int = HIDDEN) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * microbatch + torch.distributed.get_rank())
    x = torch.randn(12, 3, width, generator=draw, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def forward_backward(
    layer: Any, dtype: torch.dtype = torch.float32, microbatches: int = 1
) -> dict[str, torch.Tensor]:
    seed()
    results = {}
    for number in range(microbatches):
        x = rows_of_rank(dtype, number)
        y, _ = layer(x)
        (y.square().sum() / 100).backward()
        results |= {f"output {number}": y.detach(), f"input {number}": x.grad}
    return results | {name: p.grad for name, p in layer.named_parameters()}


def difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    assert expected.shape == actual.shape
    assert expected.dtype == actual.dtype
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return float((expected - actual).abs().max()) / scale if scale else float(actual.abs().sum())
