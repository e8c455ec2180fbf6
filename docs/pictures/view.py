"""Pictures of the viewer, taken in a headless Chromium: view-*.png beside this file.

python docs/pictures/view.py
"""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from big_trace import Size, write_trace  # noqa: E402
from browser import Browser  # noqa: E402
from view.runs import served  # noqa: E402

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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Browser(f"{folder}/browser") as browser:
        drawn = Path(folder, "run")
        write_trace(drawn, Size(ranks=16, experts=64, layers=6, microbatches=60))
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
