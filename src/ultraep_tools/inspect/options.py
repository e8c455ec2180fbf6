"""Options of `ultraep inspect`."""

from __future__ import annotations

from pathlib import Path

from ultraep.config import check_choice
from ultraep.errors import ConfigError
from ultraep.policies import get_policy
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.options import option

DTYPES = ("float32", "bfloat16", "float16")


class InspectOptions(cli.Options):
    """Model, texts, numbers of ranks and policies. Pass either `model` or `random`."""

    model: Path | None = cli.argument(
        "Directory of a checkpoint, as transformers' save_pretrained writes it.",
        "MODEL",
        default=None,
    )
    random: str | None = option(
        "Use a tiny model with random weights instead: qwen3_moe, mixtral, olmoe, deepseek_v3, "
        "gpt_oss, glm4_moe, ...",
        metavar="FAMILY",
    )
    text: list[Path] | None = option(
        "Text to send through the model. Repeat the option for several texts.",
        "code, prose and tables of Python's library",
        metavar="FILE",
    )
    ep: str | None = option(
        "Ranks in the expert-parallel group.", "8,16,64, at most the experts", metavar="N,..."
    )
    slots: str = option("Spare slots per rank.", default="1,2", metavar="N,...")
    tokens: int = option("Tokens to read from every text.", default=8192)
    window: int = option("Tokens per microbatch of all ranks.", default=4096)
    sequence_length: int = option("Tokens per sequence.", default=512)
    layers: str | None = option(
        "Layers to record. The model runs up to the last of them.",
        "all MoE layers",
        metavar="N-M,...",
    )
    policy: str = cli.policy_option("none,eplb,quota,ultraep")
    history: int = option(
        "Past windows of a layer that eplb, lplb and flashlb plan from.", default=1
    )
    out: Path = option(
        "Output directory for trace, result and report.",
        default=Path("ultraep-inspect"),
        metavar="DIR",
    )
    device: str | None = option("cpu, cuda or cuda:0.", "cuda if available")
    dtype: str | None = option("float32, bfloat16 or float16.", "as saved; float32 on a CPU")
    seed: int = option("Seed of random weights.", default=0)
    no_report: bool = cli.switch("Do not write report.html.", "--no-report")

    def __post_init__(self) -> None:
        if (self.model is None) == (self.random is None):
            raise ConfigError("pass the directory of a model or --random FAMILY, not both")
        for name in self.policies:
            get_policy(name)
        _ = self.slot_counts, self.sizes, self.recorded_layers  # refuse invalid lists
        if self.history < 1:
            raise ConfigError(f"--history must be at least 1, got {self.history}")
        if self.dtype is not None:
            check_choice("--dtype", self.dtype, DTYPES)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed must lie between 0 and 2**63 - 1, got {self.seed}")

    @property
    def name(self) -> str:
        return self.model.resolve().name if self.model else f"random {self.random}"

    @property
    def policies(self) -> tuple[str, ...]:
        return cli.split_names(self.policy, "--policy")

    @property
    def slot_counts(self) -> tuple[int, ...]:
        return cli.split_numbers(self.slots, "--slots")

    @property
    def sizes(self) -> tuple[int, ...] | None:
        return None if self.ep is None else cli.split_numbers(self.ep, "--ep")

    @property
    def recorded_layers(self) -> tuple[int, ...] | None:
        return None if self.layers is None else cli.split_ranges(self.layers, "--layers")
