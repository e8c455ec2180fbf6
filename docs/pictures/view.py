"""Pictures of the viewer, taken in a headless Chromium: view-*.png beside this file.

python docs/pictures/view.py
"""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import numpy as np  # noqa: E402
from browser import Browser  # noqa: E402
from traces import arrived  # noqa: E402
from view.runs import served  # noqa: E402

import ultraep  # noqa: E402
from ultraep import Recorder, Topology, workload  # noqa: E402
from ultraep.trace.schema import STAGES  # noqa: E402

REAL = ROOT / "benchmarks/results/trace_train_ep8_h200_202611.npz"
PICTURES = {  # trace, address, window
    "overview": (REAL, "view=overview", {"width": 1100, "height": 860}),
    "microbatch": (
        None,
        "view=record&step=18&layer=3&microbatch=1",
        {"width": 1100, "height": 1500},
    ),
    "phone": (REAL, "view=map", {"width": 390, "height": 700, "dark": True}),
}


TOPOLOGY = Topology(ranks=16, experts=64, slots=1)
LAYERS, MICROBATCHES = 6, 60
NANOSECONDS = {"experts": 40, "experts back": 80}  # per row


def draw_trace(folder: Path) -> None:
    """Write a trace with times of stages, which the recorded one does not have."""
    plans = [
        ultraep.plan(
            workload.zipf(16, 64, ratio=1.3 + seed / 9, shuffled=True, seed=seed), TOPOLOGY
        )
        for seed in range(12)
    ]
    rng = np.random.default_rng(0)
    for rank in range(TOPOLOGY.ranks):
        with Recorder(folder, TOPOLOGY, rank=rank) as recorder:
            for number in range(LAYERS * MICROBATCHES):
                moment, layer = divmod(number, LAYERS)
                plan = plans[(moment + 5 * layer) % len(plans)]
                rows = int(plan.rank_loads[rank])
                seconds = {
                    stage: 2e-4 * rng.random() + 1e-9 * NANOSECONDS.get(stage, 0) * rows
                    for stage in STAGES
                }
                recorder.add(
                    plan=plan,
                    slot_rows=arrived(plan, rank),
                    step=moment // 2,
                    layer=layer,
                    microbatch=moment % 2,
                    bytes_moved=1000 * plan.num_replicas,
                    seconds=seconds,
                )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Browser(f"{folder}/browser") as browser:
        drawn = Path(folder, "run")
        draw_trace(drawn)
        for name, (trace, address, window) in PICTURES.items():
            with served(trace or drawn) as server:
                browser.look(**window)
                browser.open(f"{server.url}#{address}")
                browser.wait("document.body && document.body.dataset.shown !== undefined")
                browser.run("new Promise((resolve) => setTimeout(resolve, 1500))")
                browser.picture(HERE / f"view-{name}.png", whole=False)
                browser.open("about:blank")


if __name__ == "__main__":
    main()
