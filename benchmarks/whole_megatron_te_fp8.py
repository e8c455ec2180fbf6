"""GPT of Megatron-Core with Transformer Engine in FP8: part of `bench_frameworks.py`."""

from functools import partial

import transformer_engine.pytorch  # type: ignore[import-not-found]  # noqa: F401
import whole_megatron

build = partial(whole_megatron.build, engine=whole_megatron.FP8)
