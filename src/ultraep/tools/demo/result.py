"""Events of a running demo, and its result with headline and table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ultraep.errors import FileError
from ultraep.files.reading import read_text
from ultraep.files.writing import write_text
from ultraep.tools.demo.sizes import Sizes
from ultraep.tools.report.words import size

RESULT_FILE = "result.json"
REPORT_FILE = "report.html"
TRACE = "trace"  # folder of a trace, inside the folder of its policy
SAME_LOSS = 1e-3  # largest relative difference at the end that counts as rounding
TABLE = {
    "training: loss, last tenth": "{loss:.4f}",
    "  loss on held-out text": "{loss_held_out:.4f}",
    "  tokens/s, whole step": "{tokens_per_second:,.0f}",
    "  imbalance before (worst)": "{imbalance_before:.3f} ({imbalance_before_worst:.2f})",
    "  imbalance after (worst)": "{imbalance_after:.3f} ({imbalance_after_worst:.2f})",
    "  replicas per layer": "{copies_per_layer:.2f}",
    "  sent for replicas": "{moved}",
    "MoE layers: tokens/s": "{layer_tokens_per_second:,.0f}",
    "  share of forced balance": "{layer_share:.1%}",
    "prefill: first token, median": "{first_token_median:.3f} s",
    "  first token, p90": "{first_token_p90:.3f} s",
}


@dataclass(frozen=True)
class Note:
    """A remark about the run."""

    text: str


@dataclass(frozen=True)
class Progress:
    """Progress of a phase: "training", "prefill" or "layers"."""

    phase: str
    done: int
    of: int
    policy: str = ""
    subject: str = ""  # of the text
    loss: float | None = None
    tokens_per_second: float | None = None
    before: float | None = None  # imbalance
    after: float | None = None


Event = Note | Progress


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """Measurements of one policy; lists have an entry for every training step."""

    policy: str
    losses: list[float]
    loss: float  # mean of the last tenth of the steps
    loss_held_out: float
    seconds: list[float]
    tokens_per_second: float  # of the median training step, all ranks
    before: list[float]  # imbalance without replicas, mean of the layers
    after: list[float]  # imbalance with replicas
    imbalance_before: float  # mean of steps and layers
    imbalance_before_worst: float
    imbalance_after: float
    imbalance_after_worst: float
    imbalance_bound: float  # mean lower bound of any plan with these slots
    copies_per_layer: float
    weights_bytes: int  # sent in training by all ranks
    gradients_bytes: int
    layer_tokens_per_second: float
    layer_share: float  # of the speed of forced balance
    first_token_median: float  # seconds
    first_token_p90: float
    prefill_seconds: float  # for all requests
    prefill_difference: float  # relative difference of the logits to the first policy


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """All measurements of one run."""

    version: str
    python: str
    machine: str
    device: str
    seed: int
    sizes: Sizes
    parameters: int  # of the model with all experts
    steps: int  # of the training
    domains: list[str]  # subject of the text in every step
    forced_tokens_per_second: float  # of the layers under forced balance, the upper bound
    requests: int
    request_tokens: int
    loss_difference: float  # largest relative difference of any step to the first policy
    loss_difference_last: float  # relative difference of the mean over the last tenth
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
        apart = self.loss_difference_last
        loss = "same loss" if apart <= SAME_LOSS else f"losses {apart:.1%} apart"
        return f"MoE layers {gain:.2f}x as fast with {last.policy}, {loss}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return head and rows with a column per policy; the last column is forced balance."""
        forced = {
            "MoE layers: tokens/s": f"{self.forced_tokens_per_second:,.0f}",
            "  share of forced balance": "100.0%",
        }
        rows = []
        for name, form in TABLE.items():
            cells = [
                form.format(**vars(row), moved=size(row.weights_bytes + row.gradients_bytes))
                for row in self.policies
            ]
            rows.append([name, *cells, forced.get(name, "")])
        return ["", *(row.policy for row in self.policies), "forced balance"], rows

    def save(self, folder: str | Path) -> Path:
        """Write the result into a folder."""
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
    """Return the folder of the trace of a policy's training."""
    return Path(out) / policy / TRACE
