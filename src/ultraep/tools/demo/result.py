"""Events of a running demo, and its result: one `DemoResult` with a headline and a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ultraep.errors import FileError
from ultraep.files.reading import read_text
from ultraep.files.writing import write_text
from ultraep.tools.demo.sizes import Sizes
from ultraep.tools.report.words import size

RESULT_FILE = "result.json"
REPORT_FILE = "report.html"
TRACE = "trace"  # folder in that of a policy
SAME_LOSS = 1e-3  # largest relative difference at the end that counts as rounding
TABLE = {
    "training: loss, last tenth": "{loss:.4f}",
    "  loss on held-out text": "{loss_held_out:.4f}",
    "  tokens/s, whole step": "{tokens_per_second:,.0f}",
    "  imbalance before (worst)": "{imbalance_before:.3f} ({imbalance_before_worst:.2f})",
    "  imbalance after (worst)": "{imbalance_after:.3f} ({imbalance_after_worst:.2f})",
    "  copies per layer": "{copies_per_layer:.2f}",
    "  moved for copies": "{moved}",
    "MoE layers: tokens/s": "{layer_tokens_per_second:,.0f}",
    "  share of forced balance": "{layer_share:.1%}",
    "prefill: first token, median": "{first_token_median:.3f} s",
    "  first token, p90": "{first_token_p90:.3f} s",
}
NUMBER = (int, float)
TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "float": NUMBER, "str": str}


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
    """Everything that one run has measured."""

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
    def headline(self) -> str:
        """The answer in one line: the last policy beside the first."""
        first, last = self.policies[0], self.policies[-1]
        if first is last:
            change = f"{last.imbalance_before:.2f} -> {last.imbalance_after:.2f}"
            return f"Imbalance {change} with {last.policy}"
        gain = last.layer_tokens_per_second / first.layer_tokens_per_second
        apart = self.loss_difference_last
        loss = "same loss" if apart <= SAME_LOSS else f"losses {apart:.1%} apart"
        return f"MoE layers {gain:.2f}x as fast with {last.policy}, {loss}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and rows of all policies side by side; the last column is forced balance."""
        ceiling = {
            "MoE layers: tokens/s": f"{self.forced_tokens_per_second:,.0f}",
            "  share of forced balance": "100.0%",
        }
        rows = []
        for name, form in TABLE.items():
            cells = [
                form.format(**vars(row), moved=size(row.weights_bytes + row.gradients_bytes))
                for row in self.policies
            ]
            rows.append([name, *cells, ceiling.get(name, "")])
        return ["", *(row.policy for row in self.policies), "forced balance"], rows

    def save(self, folder: str | Path) -> Path:
        """Write it into the folder."""
        path = Path(folder) / RESULT_FILE
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, folder: str | Path) -> DemoResult:
        """Read what `save` has written; raise `FileError` unless types and lengths are right."""
        path = Path(folder) / RESULT_FILE
        text = read_text(path)
        try:
            content: dict[str, Any] = json.loads(text)
            sizes = Sizes(**content.pop("sizes"))
            policies = [PolicyResult(**row) for row in content.pop("policies")]
            result = cls(**content, sizes=sizes, policies=policies)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FileError(f"{path}: not the result of a demo: {error}") from None
        problem = next(_problems(result), None)
        if problem is not None:
            raise FileError(f"{path}: damaged: {problem}")
        return result


def _problems(result: DemoResult) -> Iterator[str]:
    """Entries of a wrong type, and lists of a wrong length."""
    parts: list[DemoResult | PolicyResult | Sizes] = [result, result.sizes, *result.policies]
    for part in parts:
        for field in fields(part):
            value = getattr(part, field.name)
            wanted = TYPES.get(str(field.type).removeprefix("list[").removesuffix("]"))
            is_list = str(field.type).startswith("list")
            values = value if is_list and isinstance(value, list) else [value]
            wrong = is_list != isinstance(value, list)
            if wanted and (wrong or not all(isinstance(entry, wanted) for entry in values)):
                yield f"{field.name} is {value!r}"
    if not result.policies or result.steps < 1 or result.sizes.ranks < 1:
        yield "no policies, steps or ranks"
    lengths = {"domains": len(result.domains)}
    for row in result.policies:
        lengths[f"losses of {row.policy}"] = len(row.losses)
        lengths[f"seconds of {row.policy}"] = len(row.seconds)
    for name, length in lengths.items():
        if length != result.steps:
            yield f"{length} {name}, but {result.steps} steps"


def trace_folder(out: str | Path, policy: str) -> Path:
    """Where the training under a policy is recorded."""
    return Path(out) / policy / TRACE
