"""Events of a running demo, and its result with headline and table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ultraep.errors import FileError
from ultraep.files.reading import read_text
from ultraep.files.writing import write_text
from ultraep_tools.demo.sizes import Sizes
from ultraep_tools.report.page import RESULT_FILE
from ultraep_tools.report.words import size

TRACE = "trace"  # folder of a trace, inside the folder of its policy
SAME_LOSS = 1e-3  # largest relative difference that counts as rounding
TABLE = {
    "training: loss, last tenth": "{loss:.4f}",
    "  tokens/s, whole step": "{tokens_per_second:,.0f}",
    "  imbalance before (worst)": "{imbalance_before:.3f} ({imbalance_before_worst:.2f})",
    "  imbalance after (worst)": "{imbalance_after:.3f} ({imbalance_after_worst:.2f})",
    "  replicas per layer": "{replicas_per_layer:.2f}",
    "  sent for replicas": "{sent}",
    "MoE layers: tokens/s": "{layer_tokens_per_second:,.0f}",
    "  share of forced balance": "{layer_share:.1%}",
    "prefill: first token, median": "{first_token_median:.3f} s",
    "  first token, p90": "{first_token_p90:.3f} s",
}


@dataclass(frozen=True)
class Progress:
    done: int
    of: int
    text: str


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """Measurements of one policy; lists have an entry for every training step."""

    policy: str
    losses: list[float]
    loss: float  # mean of the last tenth of the steps
    seconds: list[float]
    tokens_per_second: float  # of the median training step, all ranks
    before: list[float]  # imbalance without replicas, mean of the layers
    after: list[float]  # imbalance with replicas
    imbalance_before: float  # mean of steps and layers
    imbalance_before_worst: float
    imbalance_after: float
    imbalance_after_worst: float
    replicas_per_layer: float
    bytes_sent: int  # weights and gradients, in training, by all ranks
    layer_tokens_per_second: float
    layer_share: float  # of the speed of forced balance
    first_token_median: float  # seconds
    first_token_p90: float


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """All measurements of one run."""

    version: str
    python: str
    machine: str
    seed: int
    sizes: Sizes
    parameters: int  # of the model with all experts
    steps: int  # of the training
    domains: list[str]  # subject of the text in every step
    forced_tokens_per_second: float  # of the layers under forced balance, the upper bound
    requests: int
    request_tokens: int
    loss_difference: float  # largest relative difference of any step to the first policy
    wall_seconds: float
    notes: list[str]
    policies: list[PolicyResult]

    @property
    def headline(self) -> str:
        """Compare the last policy with the first in one line."""
        first, last = self.policies[0], self.policies[-1]
        if first is last:
            change = f"{last.imbalance_before:.2f} -> {last.imbalance_after:.2f}"
            return f"Imbalance {change} with {last.policy}"
        gain = last.layer_tokens_per_second / first.layer_tokens_per_second
        apart = self.loss_difference
        loss = "same loss" if apart <= SAME_LOSS else f"losses up to {apart:.1%} apart"
        return f"MoE layers {gain:.2f}x as fast with {last.policy}, {loss}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return head and rows with a column per policy; the last column is forced balance."""
        forced = {
            "MoE layers: tokens/s": f"{self.forced_tokens_per_second:,.0f}",
            "  share of forced balance": "100.0%",
        }
        rows = []
        for name, form in TABLE.items():
            cells = [form.format(**vars(row), sent=size(row.bytes_sent)) for row in self.policies]
            rows.append([name, *cells, forced.get(name, "")])
        return ["", *(row.policy for row in self.policies), "forced balance"], rows

    def save(self, folder: str | Path) -> Path:
        path = Path(folder) / RESULT_FILE
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, folder: str | Path) -> DemoResult:
        """Read a result that `save` wrote; raise `FileError` if it is damaged."""
        path = Path(folder) / RESULT_FILE
        text = read_text(path)
        try:
            content: dict[str, Any] = json.loads(text)
            sizes = Sizes(**content.pop("sizes"))
            policies = [PolicyResult(**row) for row in content.pop("policies")]
            return cls(**content, sizes=sizes, policies=policies)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FileError(f"{path}: not the result of a demo: {error}") from None


def trace_folder(out: str | Path, policy: str) -> Path:
    return Path(out) / policy / TRACE
