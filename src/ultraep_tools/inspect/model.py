"""The model that an inspection runs: a checkpoint, or a small random model of a family.

transformers loads the weights onto the GPUs; what does not fit there goes to memory, then to
temporary files. Experts are modules in its registry. All of them are called with hidden states, the
chosen expert ids, and gates.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ultraep.errors import ConfigError, FileError
from ultraep.files.reading import check_size
from ultraep_tools.inspect.library import check_folder, library_errors, transformers
from ultraep_tools.inspect.options import InspectOptions

MARK = "is_concatenated"  # the registry sets it on every module of experts
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
MOST_CONFIG, MOST_INDEX = 4 << 20, 32 << 20  # bytes
MOST_LAYERS, LARGEST = 1000, 2**31  # limits for numbers in a configuration
DEQUANTISED = ("fp8", "mxfp4")  # quantisation methods that are dequantised while reading


class InspectedModel:
    """A model before its weights are loaded.

    experts: names of the modules of experts, by layer.   counts: experts of each.
    layers: of the decoder.   nbytes: of the weights.
    """

    def __init__(self, options: InspectOptions) -> None:
        self.folder, self.path = options.model, options.model or Path(options.name)
        self.device_map: Any = {"": device_of(options.device)} if options.device else "auto"
        self.device = device_of(options.device)
        self.config = read_config(options.model) if options.model else small_config(options.random)
        self.dtype = self._dtype(options.dtype)
        with self._errors("build this model"), torch.device("meta"):
            outline = self._auto_class.from_config(self.config, dtype=self.dtype)
        weights = list(outline.parameters())
        self.nbytes = sum(weight.nbytes for weight in weights)
        self.parameters = sum(weight.numel() for weight in weights)
        self.layers, self.experts = find_experts(outline)
        self.counts = {n: num_experts(outline, name) for n, name in self.experts.items()}

    @contextmanager
    def loaded(self) -> Iterator[Any]:
        """Hold the weights inside of a `with`."""
        prefix = "ultraep-inspect-"
        with tempfile.TemporaryDirectory(prefix=prefix) as folder, self._errors("load the weights"):
            yield self._load(folder).eval()

    def _load(self, offload_folder: str) -> Any:
        if self.folder is None:
            torch.manual_seed(0)
            return self._auto_class.from_config(self.config, dtype=self.dtype).to(self.device)
        model, info = self._auto_class.from_pretrained(
            self.folder,
            config=self.config,
            dtype=self.dtype,
            device_map=self.device_map,
            offload_folder=offload_folder,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, with names
            output_loading_info=True,
        )
        for name, saved, size in sorted(info["mismatched_keys"]):
            raise FileError(
                f"{self.folder}: weights do not fit {CONFIG}: {name} has shape {list(saved)} in "
                f"the files, the model needs {list(size)}"
            )
        if missing := sorted(info["missing_keys"]):
            raise FileError(f"{self.folder}: the files hold no weights for {missing[0]}")
        return model

    def _errors(self, verb: str) -> Any:
        return library_errors(self.path, f"transformers cannot {verb}")

    def _dtype(self, name: str | None) -> torch.dtype:
        quantised = is_quantised(self.config)
        if quantised and name is not None:
            raise ConfigError(
                f"{self.path}: quantised weights are computed in the saved dtype; remove --dtype"
            )
        if name is None and self.device.type == "cpu" and not quantised:
            return torch.float32  # the fastest one on most CPUs
        dtype = getattr(torch, name) if name else self.config.get_text_config().dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise FileError(f"{self.path}: dtype must be a floating-point type, got {dtype!r}")
        return dtype

    @property
    def _auto_class(self) -> Any:
        """The class of models with a head, whose weights have the names in the files."""
        library = transformers()
        has_head = type(self.config) in library.AutoModelForCausalLM._model_mapping
        return library.AutoModelForCausalLM if has_head else library.AutoModel


def device_of(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"--device {name}, but torch finds {count} GPUs; use --device cpu")
    return device


def find_experts(model: Any) -> tuple[int, dict[int, str]]:
    """Return the number of layers, and the names of the modules of experts by layer.

    Layers are members of the outermost module lists around the experts, in order. If a layer has
    several modules of experts, the modules are numbered instead.
    """
    decoder = model.get_decoder()
    inside = {module for module in decoder.modules() if hasattr(module, MARK)}
    names = [name for name, module in model.named_modules() if module in inside]
    lists = [_outermost_list(model, name) for name in names]
    if not names or None in lists:
        raise ConfigError(
            f"{type(model).__name__} has no experts of transformers' registry; inspect a "
            "Mixture-of-Experts model whose experts are in the registry"
        )
    blocks = [
        f"{part}.{number}."
        for part in sorted(set(filter(None, lists)))
        for number in range(len(model.get_submodule(part)))
    ]
    layers = [next(n for n, block in enumerate(blocks) if name.startswith(block)) for name in names]
    if len(set(layers)) < len(layers):
        layers = list(range(len(layers)))
    return len(blocks), dict(zip(layers, names, strict=True))


def _outermost_list(model: nn.Module, name: str) -> str | None:
    parts = name.split(".")
    paths = [".".join(parts[:end]) for end in range(1, len(parts))]
    return next((p for p in paths if isinstance(model.get_submodule(p), nn.ModuleList)), None)


def num_experts(model: nn.Module, name: str) -> int:
    """Return the experts in a module of the registry: the length of each of its weights."""
    return len(next(model.get_submodule(name).parameters()))


# -- configurations ------------------------------------------------------------------------------


def read_config(folder: Path) -> Any:
    check_folder(folder)
    path = folder / CONFIG
    if not path.is_file():
        raise FileError(f"{folder}: not a checkpoint of transformers, there is no {CONFIG}")
    check_size(path, MOST_CONFIG)
    if (folder / INDEX).is_file():
        check_size(folder / INDEX, MOST_INDEX)
    with library_errors(path, "transformers cannot read it"):
        config = transformers().AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        numbers = config.to_dict()
    _check_numbers(path, numbers)
    for settings in _quantisations(config):
        _dequantise(folder, settings)
    return config


def is_quantised(config: Any) -> bool:
    return any(_quantisations(config))


def _quantisations(config: Any) -> list[dict[str, Any]]:
    parts = config, config.get_text_config()
    return [part.quantization_config for part in parts if hasattr(part, "quantization_config")]


def _check_numbers(path: Path, table: Mapping[Any, Any]) -> None:
    """Refuse sizes that no model has; transformers would build layers for hours."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            _check_numbers(path, value)
        most = MOST_LAYERS if "layers" in str(name) or name == "depth" else LARGEST
        if isinstance(value, int) and abs(value) > most:
            raise FileError(f"{path}: {name} is {value}, the limit is {most}")


def _dequantise(folder: Path, settings: dict[str, Any]) -> None:
    """Let transformers dequantise the weights: quantised experts are not in the registry."""
    method = settings.get("quant_method")
    if method not in DEQUANTISED:
        raise ConfigError(
            f"{folder}: weights quantised by {method} cannot be read, only "
            f"{' and '.join(DEQUANTISED)}; save the model in bfloat16"
        )
    settings["dequantize"] = True


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


def small_config(family: str | None) -> Any:
    """Return small sizes with the family's number of experts and of experts per token."""
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
