"""Options of `ultraep inspect`."""

from __future__ import annotations

from pathlib import Path

from ultraep.config import check_choice
from ultraep.errors import ConfigError
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.options import option
from ultraep_tools.inspect.library import check_folder

FAMILIES = (  # of which small models can be drawn
    *("afmoe", "deepseek_v3", "deepseek_v4", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss"),
    *("jamba", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"),
)
DTYPES = ("float32", "bfloat16", "float16")


class InspectOptions(cli.Options):
    """Model, texts and numbers of ranks. Pass either `model` or `random`."""

    model: Path | None = cli.argument(
        "Directory of a checkpoint, as transformers' save_pretrained writes it.",
        "MODEL",
        default=None,
    )
    random: str | None = option(
        f"Use a tiny model with random weights instead: {', '.join(FAMILIES)}.", metavar="FAMILY"
    )
    text: list[Path] | None = option(
        "Text to send through the model. Repeat the option for several texts.",
        "code, prose and tables of Python's library",
        metavar="FILE",
    )
    ep: str | None = option(
        "Ranks in the expert-parallel group.", "8,16,64, at most the experts", metavar="N,..."
    )
    slots: int = cli.slots_option()
    tokens: int = option("Tokens to read from every text.", default=8192)
    window: int = option("Tokens per microbatch of all ranks.", default=4096)
    sequence_length: int = option("Tokens per sequence.", default=512)
    layers: str | None = option(
        "Layers to record. The model runs up to the last of them.",
        "all MoE layers",
        metavar="N-M,...",
    )
    out: Path = option(
        "Output directory for trace and result.",
        default=Path("ultraep-inspect"),
        metavar="DIR",
    )
    device: str | None = option(
        "cpu, cuda or cuda:0.", "all GPUs; what does not fit goes to memory, then to disk"
    )
    dtype: str | None = option("float32, bfloat16 or float16.", "as saved; float32 on a CPU")

    def __post_init__(self) -> None:
        if (self.model is None) == (self.random is None):
            raise ConfigError("pass the directory of a model or --random FAMILY, not both")
        _ = self.sizes, self.recorded_layers  # refuse invalid lists
        if self.model is not None:
            check_folder(self.model)
        if self.random is not None:
            check_choice("--random", self.random, FAMILIES)
        if self.dtype is not None:
            check_choice("--dtype", self.dtype, DTYPES)

    @property
    def name(self) -> str:
        return self.model.resolve().name if self.model else f"random {self.random}"

    @property
    def sizes(self) -> tuple[int, ...] | None:
        return None if self.ep is None else cli.split_numbers(self.ep, "--ep")

    @property
    def recorded_layers(self) -> tuple[int, ...] | None:
        if self.layers is None:
            return None
        return tuple(sorted(cli.split_numbers(self.layers, "--layers")))
