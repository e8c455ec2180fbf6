"""Pictures of the viewer, taken in a headless Chromium: view-*.png beside this file.

python docs/pictures/view.py
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import browse  # noqa: E402
from view.runs import served  # noqa: E402

TRACE = ROOT / "benchmarks/results/trace_train_ep8_h200_202611.npz"
PICTURES = {  # address, width, height, colour scheme
    "overview": ("view=overview", 1100, 860, "light"),
    "microbatch": ("view=record", 1100, 880, "light"),
    "phone": ("view=overview", 400, 700, "dark"),
}


def main() -> None:
    with served(TRACE) as server:
        for name, (address, width, height, scheme) in PICTURES.items():
            picture = f"--screenshot={HERE / f'view-{name}.png'}"
            theme = ["--force-dark-mode"] if scheme == "dark" else []
            browse(f"{server.url}#{address}", picture, *theme, width=width, height=height)


if __name__ == "__main__":
    main()
