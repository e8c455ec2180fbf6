"""What the demo tells while it runs, and what it leaves behind: events, and one `DemoResult`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ultraep.errors import FileError
from ultraep.files.reading import read_text
from ultraep.files.writing import write_text
from ultraep.tools.demo.sizes import Sizes

RESULT_FILE = "result.json"
REPORT_FILE = "report.html"
TRACE = "trace"  # folder in that of a policy


@dataclass(frozen=True)
class Note:
    """A sentence for the user."""

    words: str


@dataclass(frozen=True)
class Progress:
    """One step of a phase: "training", "prefill" or "layers"."""

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
    """One policy. Lists have an entry for every step of the training."""

    policy: str
    losses: list[float]
    loss: float  # mean of the last tenth of the steps
    loss_held_out: float
    seconds: list[float]
    tokens_per_second: float  # of the median step of the training, all ranks
    before: list[float]  # imbalance without copies, mean of the layers
    after: list[float]  # with them
    imbalance_before: float  # mean of steps and layers
    imbalance_before_worst: float
    imbalance_after: float
    imbalance_after_worst: float
    imbalance_bound: float  # what no plan with these slots could go below, mean
    copies_per_layer: float
    weights_bytes: int  # sent in training, all ranks
    gradients_bytes: int
    layer_tokens_per_second: float
    layer_share: float  # of forced balance
    first_token_median: float  # seconds
    first_token_p90: float
    prefill_seconds: float  # all requests
    prefill_difference: float  # of the first logits from those of the first policy, relative


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Everything that one run has measured; nothing else is in it."""

    version: str
    python: str
    machine: str
    device: str
    seed: int
    sizes: Sizes
    parameters: int  # of the model, all experts
    steps: int  # of the training
    domains: list[str]  # subject of the text of every step
    forced_tokens_per_second: float  # of the layers: the ceiling
    requests: int
    request_tokens: int
    loss_difference: float  # largest relative one of any step, to the first policy
    loss_difference_last: float  # of the mean over the last tenth
    wall_seconds: float
    notes: list[str]
    policies: list[PolicyResult]

    @property
    def loss_difference_first(self) -> float:
        """The largest relative difference of any step of the first tenth."""
        tenth, first = -(-self.steps // 10), self.policies[0].losses
        return max(off(row.losses[:tenth], first[:tenth]) for row in self.policies)

    def save(self, folder: str | Path) -> Path:
        """Write it into the folder."""
        path = Path(folder) / RESULT_FILE
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, folder: str | Path) -> DemoResult:
        """Read what `save` has written."""
        path = Path(folder) / RESULT_FILE
        text = read_text(path)
        try:
            content: dict[str, Any] = json.loads(text)
            sizes = Sizes(**content.pop("sizes"))
            policies = [PolicyResult(**row) for row in content.pop("policies")]
            return cls(**content, sizes=sizes, policies=policies)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FileError(f"{path}: not the result of a demo: {error}") from None


def off(ones: list[float], others: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ones, others, strict=True))


def trace_folder(out: str | Path, policy: str) -> Path:
    """Where the training under a policy is recorded."""
    return Path(out) / policy / TRACE
