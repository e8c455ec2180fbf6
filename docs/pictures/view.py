"""Pictures of the viewer, taken in a headless Chromium: view-*.png beside this file.

python docs/pictures/view.py
"""

import base64
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser  # noqa: E402
from view.runs import served  # noqa: E402

TRACE = ROOT / "benchmarks/results/trace_train_ep8_h200_202611.npz"
PICTURES = {  # address, width, height, colour scheme
    "overview": ("view=overview", 1100, 860, "light"),
    "microbatch": ("view=record", 1100, 880, "light"),
    "phone": ("view=overview", 400, 700, "dark"),
}


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Browser(folder) as browser,
        served(TRACE) as server,
    ):
        for name, (address, width, height, scheme) in PICTURES.items():
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.call("Emulation.setEmulatedMedia", features=features)
            browser.look(width=width, height=height)
            browser.open("about:blank")
            browser.open(f"{server.url}#{address}")
            browser.wait("document.body && document.body.dataset.shown === location.hash")
            browser.run("new Promise((resolve) => setTimeout(resolve, 1500))")
            data = browser.call("Page.captureScreenshot", format="png")["data"]
            (HERE / f"view-{name}.png").write_bytes(base64.b64decode(data))


if __name__ == "__main__":
    main()
