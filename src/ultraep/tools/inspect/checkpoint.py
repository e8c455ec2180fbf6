"""Checkpoint: a saved model that is never all in memory.

The model is built without weights. A block gets its weights from the safetensors files for the time
of a `with`; the rest of the model (embeddings, norms) keeps its weights. The loader of transformers
makes weights of the tensors in the files, for one block at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ultraep.errors import ConfigError, FileError
from ultraep.files.reading import check_size, read_text
from ultraep.tools.inspect.anatomy import Anatomy
from ultraep.tools.inspect.library import Understood, built, one_line, transformers

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MOST_CONFIG = 4 << 20  # bytes
MOST_INDEX = 32 << 20
MOST_SAFETENSORS_HEADER = 16 << 20
MOST_BUFFERS = 1 << 28
MOST_LAYERS, LARGEST = 1000, 2**31  # of numbers in a configuration
PLAIN_WHEN_READ = ("fp8", "mxfp4")  # kinds of quantised weights
COPIES = 3  # of the weights of a block, while tensors of the files are put together
AROUND = ""  # in place of the name of a block: what is in none
Place = tuple[nn.Module, str]


class Checkpoint:
    """A local folder that `save_pretrained` has written. In its context, what is around the blocks
    is filled.

    dtype: what is computed in; None: as weights were saved.
    """

    def __init__(
        self, folder: str | Path, *, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        self.folder, self.device = Path(folder), device
        self.config = read_config(self.folder)
        self._saved = saved_dtype(self.config, self.folder)
        self.dtype = dtype or self._saved
        with self._understood("cannot be dequantised by transformers"):
            self._quantizer = dequantizer(self.config, self.folder)
        self._tensors = {
            key: tensor for path in weight_files(self.folder) for key, tensor in saved_in(path)
        }
        with self._understood("transformers cannot build this model"):
            self.model = self._without_weights()
        self.anatomy = Anatomy.of(self.model)
        mapping = transformers("conversion_mapping").get_model_conversion_mapping
        self._mapping = mapping(self.model, hf_quantizer=self._quantizer)
        self._empty = self._places()
        self._keys = self._keys_of_blocks()

    def _understood(self, failed: str) -> Understood:
        return Understood(self.folder / CONFIG, failed)

    def __enter__(self) -> Checkpoint:
        self._fill(AROUND)
        self._fill_buffers()
        return self

    def __exit__(self, *error: object) -> None:
        self._empty_again(AROUND)

    @contextmanager
    def lend(self, block: str) -> Iterator[None]:
        """The weights of a block, until the end of the `with`."""
        try:
            self._fill(block)
            yield
        finally:
            self._empty_again(block)

    def bytes_to_read(self, blocks: list[str]) -> int:
        """Bytes of the files that belong to these blocks, and to what is around them."""
        keys = [key for block in (AROUND, *blocks) for key in self._keys[block]]
        return sum(self._tensors[key].nbytes for key in keys)

    def bytes_in_memory(self) -> int:
        """Bytes of weights at one time: those around the blocks, the largest block, and its tensors
        of the files while they are put together.
        """
        counts = {
            block: sum(empty.numel() for empty in places.values())
            for block, places in self._empty.items()
        }
        around = counts.pop(AROUND)
        largest, sizes = max(counts.values()), (self.dtype.itemsize, self._saved.itemsize)
        return around * sizes[0] + largest * max(sum(sizes), COPIES * sizes[1])

    # -- the model without weights ---------------------------------------------------------------

    def _without_weights(self) -> Any:
        with torch.device("meta"):
            model = built(self.config, self._saved)
            if self._quantizer is not None:
                self._quantizer.preprocess_model(model=model, dtype=self._saved, device_map=None)
        return model

    def _places(self) -> dict[str, dict[Place, torch.Tensor]]:
        """By block: modules with the names of their tensors, and what stands there while empty."""
        transient = {name for name, _ in self.model.named_non_persistent_buffers()}
        places: dict[str, dict[Place, torch.Tensor]] = {name: {} for name in self.anatomy.blocks}
        places[AROUND] = {}
        inside = {id(module) for module in self.anatomy.decoder.modules()}
        for path, module in self.model.named_modules():
            if id(module) not in inside:
                continue
            block = self._block_of(f"{path}.")
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and f"{path}.{name}".lstrip(".") not in transient:
                    places[block][module, name] = tensor
        return places

    def _block_of(self, path: str) -> str:
        match = self._block_names.match(path)
        return match[1] if match else AROUND

    @cached_property
    def _block_names(self) -> re.Pattern[str]:
        return re.compile("(" + "|".join(map(re.escape, self.anatomy.blocks)) + r")\.")

    def _keys_of_blocks(self) -> dict[str, list[str]]:
        """Names of tensors in the files, by the block that they belong to."""
        loading = transformers("core_model_loading")
        mapping = self._mapping
        renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
        wanted, prefix = self.model.state_dict(), self.model.base_model_prefix
        own = {self._name_of(place) for places in self._empty.values() for place in places}
        keys = defaultdict(list)
        for key in self._tensors:
            name, _ = loading.rename_source_key(key, renamings, converters, prefix, wanted)
            if name not in wanted:  # the loader, too, takes the name as it is then
                name = key
            if name in own:
                keys[self._block_of(name)].append(key)
        return keys

    def _name_of(self, place: Place) -> str:
        module, name = place
        path = self._paths[id(module)]
        return f"{path}.{name}" if path else name

    @cached_property
    def _paths(self) -> dict[int, str]:
        return {id(module): path for path, module in self.model.named_modules()}

    # -- weights ---------------------------------------------------------------------------------

    def _fill(self, block: str) -> None:
        """By the library's own loader, as saved; then as computed in."""
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
            slices([self._tensors[key] for key in self._keys[block]]) as tensors,
            self._understood("transformers cannot load the weights"),
        ):
            info, _ = load(self.model, tensors, settings)
        self._check_loaded(info)
        for module, name in self._empty[block]:
            tensor, path = getattr(module, name), self._name_of((module, name))
            if tensor.is_meta:
                raise FileError(f"{self.folder}: the files hold no weights for {path}")
            if tensor.is_floating_point() and not any(part in path for part in exceptions):
                tensor.data = tensor.data.to(self.dtype)

    def _check_loaded(self, info: Any) -> None:
        wrong = [
            *(
                f"{name} is {list(saved)} there, not {list(size)}"
                for name, saved, size in sorted(info.mismatched_keys)
            ),
            *(
                f"{name}: is a tensor missing or renamed? {one_line(words)}"
                for name, words in info.conversion_errors.items()
            ),
        ]
        if wrong:
            raise FileError(f"{self.folder}: weights that do not fit {CONFIG}: {wrong[0]}")

    def _empty_again(self, block: str) -> None:
        for (module, name), empty in self._empty[block].items():
            setattr(module, name, empty)

    def _fill_buffers(self) -> None:
        """Make what is not in files but follows from the configuration, such as frequencies."""
        buffers = dict(self.model.named_non_persistent_buffers())
        size = sum(buffer.nbytes for buffer in buffers.values())
        if size > MOST_BUFFERS:
            raise FileError(
                f"{self.folder / CONFIG}: the model needs buffers of {size:,} bytes, at most "
                f"{MOST_BUFFERS:,} are made"
            )
        for name, buffer in buffers.items():
            path, _, own = name.rpartition(".")
            module = self.model.get_submodule(path)
            setattr(module, own, torch.empty_like(buffer, device=self.device))
        for module in self.anatomy.decoder.modules():
            if module._non_persistent_buffers_set:
                self.model._init_weights(module)


# -- a folder ------------------------------------------------------------------------------------


def read_config(folder: Path) -> Any:
    """The configuration of a local checkpoint; `ConfigError` or `FileError` if there is none."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no folder of this machine. A model must be here already, as "
            "save_pretrained writes it; nothing is downloaded"
        )
    if not (folder / CONFIG).is_file():
        raise FileError(f"{folder}: no checkpoint of transformers, there is no {CONFIG}")
    library = transformers()
    check_size(folder / CONFIG, MOST_CONFIG)
    with Understood(folder / CONFIG, "transformers cannot read it"):
        config = library.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        sizes = config.to_dict()
    _check_numbers(folder / CONFIG, sizes)
    return config


def _check_numbers(path: Path, table: Mapping[Any, Any]) -> None:
    """Refuse numbers that no model has; transformers would build layers for hours."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            _check_numbers(path, value)
        most = MOST_LAYERS if "layers" in str(name) or name == "depth" else LARGEST
        if isinstance(value, int) and abs(value) > most:
            raise FileError(f"{path}: {name} is {value}, but at most {most} is possible")


def saved_dtype(config: Any, folder: Path) -> torch.dtype:
    """Return the type that the weights were saved in."""
    dtype = config.get_text_config().dtype or torch.float32
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise FileError(f"{folder / CONFIG}: dtype must be a floating-point type, got {dtype!r}")
    return dtype


def dequantizer(config: Any, folder: Path) -> Any:
    """What makes plain weights of quantised ones while they are read; None: they are plain.

    Experts that are multiplied in a quantised form are not those of the registry.
    """
    settings = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if not settings:
        return None
    method = settings.get("quant_method")
    if method not in PLAIN_WHEN_READ:
        raise ConfigError(
            f"{folder}: weights quantised by {method} are not read here, only by "
            f"{' and '.join(PLAIN_WHEN_READ)}: save the model in bfloat16"
        )
    quantizers = transformers("quantizers.auto").AutoHfQuantizer
    return quantizers.from_config({**settings, "dequantize": True}, pre_quantized=True)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(read_text(index, most=MOST_INDEX))["weight_map"].values())
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FileError(f"{index}: damaged: {one_line(error)}") from None
        files = [folder / str(name) for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = next((path for path in files if not path.is_file()), None)
    if missing is not None:
        raise FileError(f"{missing}: no such file, but {INDEX} names it")
    if not files:
        raise FileError(f"{folder}: no weights, there is no file *.safetensors")
    return files


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a file, known by its header."""

    key: str
    path: Path
    nbytes: int


def saved_in(path: Path) -> list[tuple[str, SavedTensor]]:
    """What a file holds, by name."""
    with _opened(path) as file:
        return [
            (key, SavedTensor(key, path, _nbytes(file.get_slice(key))))
            for key in file.keys()  # noqa: SIM118  no dict
        ]


@contextmanager
def slices(wanted: list[SavedTensor]) -> Iterator[dict[str, Any]]:
    """Tensors that are read when they are used; files are mapped no longer than that."""
    with ExitStack() as stack:
        files = {path: stack.enter_context(_opened(path)) for path in {t.path for t in wanted}}
        yield {tensor.key: files[tensor.path].get_slice(tensor.key) for tensor in wanted}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        _check_header(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path}: cannot be read, truncated or damaged: {error}") from None


def _check_header(path: Path) -> None:
    """Refuse a header that is too long, before the whole of it is parsed."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MOST_SAFETENSORS_HEADER:
        raise FileError(
            f"{path}: cannot be read, truncated or damaged: it claims a header of {size:,} bytes, "
            f"at most {MOST_SAFETENSORS_HEADER:,} are read"
        )


def _nbytes(tensor: Any) -> int:
    """Bytes of a tensor in a file, by its type: BF16, F32, F8_E4M3, BOOL."""
    bits = re.search(r"\d+", tensor.get_dtype())
    return int(math.prod(tensor.get_shape())) * (int(bits[0]) if bits else 8) // 8
