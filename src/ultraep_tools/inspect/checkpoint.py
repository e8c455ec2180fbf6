"""Checkpoint: a saved model of which one block at a time is in memory.

The model is built without weights. A block gets its weights from the safetensors files inside a
`with`; the modules outside of blocks (embeddings, norms) keep theirs. transformers' own loader
converts the tensors of the files into weights, for one block at a time.

RandomModel: a small random model of one of transformers' families, to try `ultraep inspect`. It has
the family's number of experts and of experts per token; all other sizes are small.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ultraep.errors import ConfigError, FileError
from ultraep.files.reading import check_size, read_text
from ultraep_tools.inspect.blocks import OUTSIDE, Anatomy
from ultraep_tools.inspect.library import (
    build_model,
    check_folder,
    library_errors,
    one_line,
    transformers,
)

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MOST_CONFIG = 4 << 20  # bytes
MOST_INDEX = 32 << 20
MOST_HEADER = 16 << 20
MOST_BUFFERS = 1 << 28
MOST_LAYERS, LARGEST = 1000, 2**31  # limits for numbers in a configuration
DEQUANTISED = ("fp8", "mxfp4")  # quantisation methods that are dequantised while reading


class Checkpoint:
    """A local directory written by `save_pretrained`.

    dtype: dtype of the computation; None: as saved.
    """

    def __init__(
        self, folder: str | Path, *, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        self.folder, self.device = Path(folder), device
        self.config = read_config(self.folder)
        self._saved = saved_dtype(self.config, self.folder)
        self.dtype = dtype or self._saved
        with self._errors("transformers cannot dequantise the weights"):
            self._quantizer = dequantizer(self.config, self.folder)
        files = weight_files(self.folder)
        self.nbytes = sum(path.stat().st_size for path in files)
        self._files = {key: path for path in files for key in keys_in(path)}
        with self._errors("transformers cannot build this model"), torch.device("meta"):
            self.model = build_model(self.config, self._saved)
            if self._quantizer is not None:
                self._quantizer.preprocess_model(
                    model=self.model, dtype=self._saved, device_map=None
                )
        self.anatomy = Anatomy.of(self.model)
        self._block_name = re.compile(rf"({'|'.join(map(re.escape, self.anatomy.blocks))})\.")
        mapping = transformers("conversion_mapping").get_model_conversion_mapping
        self._mapping = mapping(self.model, hf_quantizer=self._quantizer)
        self._weights = self._weights_by_block()
        self._keys = self._keys_by_block()

    def _errors(self, message: str) -> AbstractContextManager[None]:
        return library_errors(self.folder / CONFIG, message)

    @contextmanager
    def loaded(self, block: str) -> Iterator[None]:
        """Hold the weights of a block, or of the modules OUTSIDE, inside of a `with`."""
        try:
            self._load(block)
            if block == OUTSIDE:
                self._fill_buffers()
            yield
        finally:
            self._unload(block)

    def _weights_by_block(self) -> dict[str, dict[str, torch.Tensor]]:
        """The weights of the decoder, still on the meta device, by block and path."""
        prefix = self.anatomy.prefix
        weights: dict[str, dict[str, torch.Tensor]] = {
            name: {} for name in (OUTSIDE, *self.anatomy.blocks)
        }
        for path, tensor in self.model.state_dict(keep_vars=True).items():
            if path.startswith(prefix):
                weights[self._block_of(path)][path] = tensor
        return weights

    def _block_of(self, path: str) -> str:
        match = self._block_name.match(path)
        return match[1] if match else OUTSIDE

    def _keys_by_block(self) -> dict[str, list[str]]:
        loading = transformers("core_model_loading")
        renamings = [m for m in self._mapping if isinstance(m, loading.WeightRenaming)]
        converters = [m for m in self._mapping if isinstance(m, loading.WeightConverter)]
        state, prefix = self.model.state_dict(), self.model.base_model_prefix
        own = {path for weights in self._weights.values() for path in weights}
        keys = defaultdict(list)
        for key in self._files:
            name, _ = loading.rename_source_key(key, renamings, converters, prefix, state)
            if name not in state:  # the loader does the same
                name = key
            if name in own:
                keys[self._block_of(name)].append(key)
        return keys

    def _load(self, block: str) -> None:
        """Load weights in their saved dtype with transformers' loader, then convert them."""
        exceptions = self.model._get_dtype_plan(self._saved)  # by parts of names
        settings = transformers("modeling_utils").LoadStateDictConfig(
            device_map={"": self.device},
            dtype=self._saved,
            dtype_plan=exceptions,
            weight_mapping=self._mapping,
            hf_quantizer=self._quantizer,
        )
        load = transformers("core_model_loading").convert_and_load_state_dict_in_model
        with (
            slices(self._files, self._keys[block]) as tensors,
            self._errors("transformers cannot load the weights"),
        ):
            info, _ = load(self.model, tensors, settings)
        self._check_loaded(info)
        for path in self._weights[block]:
            tensor = self.model.get_parameter_or_buffer(path)
            if tensor.is_meta:
                raise FileError(f"{self.folder}: the files hold no weights for {path}")
            if tensor.is_floating_point() and not any(part in path for part in exceptions):
                tensor.data = tensor.data.to(self.dtype)

    def _check_loaded(self, info: Any) -> None:
        for name, saved, size in sorted(info.mismatched_keys):
            raise FileError(
                f"{self.folder}: weights do not fit {CONFIG}: {name} has shape {list(saved)} in "
                f"the files, the model needs {list(size)}"
            )
        for name, error in info.conversion_errors.items():
            raise FileError(
                f"{self.folder}: weights do not fit {CONFIG}: {name}: is a tensor missing or "
                f"renamed? {one_line(error)}"
            )

    def _unload(self, block: str) -> None:
        for path, empty in self._weights[block].items():
            self._set(path, empty)

    def _set(self, path: str, tensor: torch.Tensor) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, tensor)

    def _fill_buffers(self) -> None:
        """Compute buffers that are not saved, such as rotary frequencies."""
        buffers = dict(self.model.named_non_persistent_buffers())
        size = sum(buffer.nbytes for buffer in buffers.values())
        if size > MOST_BUFFERS:
            raise FileError(
                f"{self.folder / CONFIG}: the model needs buffers of {size:,} bytes, the limit is "
                f"{MOST_BUFFERS:,}"
            )
        for path, buffer in buffers.items():
            self._set(path, torch.empty_like(buffer, device=self.device))
        for module in self.anatomy.decoder.modules():
            if module._non_persistent_buffers_set:
                self.model._init_weights(module)


# -- files ---------------------------------------------------------------------------------------


def read_config(folder: Path) -> Any:
    check_folder(folder)
    path = folder / CONFIG
    if not path.is_file():
        raise FileError(f"{folder}: not a checkpoint of transformers, there is no {CONFIG}")
    library = transformers()
    check_size(path, MOST_CONFIG)
    with library_errors(path, "transformers cannot read it"):
        config = library.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        numbers = config.to_dict()
    _check_numbers(path, numbers)
    return config


def _check_numbers(path: Path, table: Mapping[Any, Any]) -> None:
    """Refuse sizes that no model has; transformers would build layers for hours."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            _check_numbers(path, value)
        most = MOST_LAYERS if "layers" in str(name) or name == "depth" else LARGEST
        if isinstance(value, int) and abs(value) > most:
            raise FileError(f"{path}: {name} is {value}, the limit is {most}")


def saved_dtype(config: Any, folder: Path) -> torch.dtype:
    dtype = config.get_text_config().dtype or torch.float32
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise FileError(f"{folder / CONFIG}: dtype must be a floating-point type, got {dtype!r}")
    return dtype


def dequantizer(config: Any, folder: Path) -> Any:
    """The quantizer of transformers that dequantises weights while reading; None if not needed.

    Modules that compute with quantised experts are not in the registry.
    """
    settings = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if not settings:
        return None
    method = settings.get("quant_method")
    if method not in DEQUANTISED:
        raise ConfigError(
            f"{folder}: weights quantised by {method} cannot be read, only "
            f"{' and '.join(DEQUANTISED)}; save the model in bfloat16"
        )
    quantizers = transformers("quantizers.auto").AutoHfQuantizer
    return quantizers.from_config({**settings, "dequantize": True}, pre_quantized=True)


def weight_files(folder: Path) -> list[Path]:
    files, index = sorted(folder.glob("*.safetensors")), folder / INDEX
    if index.is_file():
        try:
            names = set(json.loads(read_text(index, most=MOST_INDEX))["weight_map"].values())
            files = [folder / str(name) for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FileError(f"{index}: damaged: {one_line(error)}") from None
    for path in files:
        if not path.is_file():
            raise FileError(f"{path}: no such file, but {INDEX} lists it")
    if not files:
        raise FileError(f"{folder}: no weights: the directory has no file *.safetensors")
    return files


def keys_in(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


@contextmanager
def slices(files: Mapping[str, Path], keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Tensors by key, read on use; their files are open inside of the `with`."""
    with ExitStack() as stack:
        opened = {path: stack.enter_context(_open(path)) for path in {files[key] for key in keys}}
        yield {key: opened[files[key]].get_slice(key) for key in keys}


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > MOST_HEADER:  # safetensors would parse all of it
            raise FileError(
                f"{path}: truncated or damaged: the header claims {header:,} bytes, the limit is "
                f"{MOST_HEADER:,}"
            )
        with safe_open(path, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path}: truncated or damaged: {error}") from None


# -- random models -------------------------------------------------------------------------------

SMALL: dict[str, int] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 1,
}
ALWAYS = {"head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LATENT: dict[str, int] = {  # for multi-head latent attention
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 16,
    "num_key_value_heads": 4,
}


def small_config(family: str) -> Any:
    library = transformers()
    if family not in library.CONFIG_MAPPING:
        raise ConfigError(
            f"transformers {library.__version__} does not have family {family!r}; install a newer "
            "version, or choose another family"
        )
    defaults = library.AutoConfig.for_model(family).to_dict()
    sizes = SMALL | ALWAYS | (LATENT if "kv_lora_rank" in defaults else {})
    sizes = {name: size for name, size in sizes.items() if name in defaults or name in ALWAYS}
    return library.AutoConfig.for_model(family, **sizes)


class RandomModel:
    """A small model of a family with random weights in memory; used like a `Checkpoint`."""

    def __init__(self, family: str, *, device: torch.device, dtype: torch.dtype | None) -> None:
        self.config, self.device, self.dtype = small_config(family), device, dtype or torch.float32
        torch.manual_seed(0)
        self.model = build_model(self.config, torch.float32).to(device, self.dtype)
        self.nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        self.anatomy = Anatomy.of(self.model)

    def loaded(self, _: str) -> AbstractContextManager[None]:
        """The weights are always in memory."""
        return nullcontext()
