"""Pages as a headless Chromium shows them."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

OPTIONS = ("--headless", "--disable-gpu", "--no-sandbox", "--no-first-run", "--hide-scrollbars")
OPTIONS += ("--disable-background-networking", "--disable-dev-shm-usage", "--enable-logging=stderr")
DRAWN = "--virtual-time-budget=20000"  # milliseconds that pass as fast as the page can draw
PATIENCE = 120


def chromium():
    names = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
    found = next(filter(None, map(shutil.which, names)), None)
    if found:
        return found
    own = Path.home() / ".cache" / "ms-playwright"
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", own))
    patterns = ("chromium*/chrome-*/chrome", "chromium*/chrome-*/*headless*shell")
    return next((str(path) for p in patterns for path in sorted(cache.glob(p))), None)


def browse(url, *options, width=1200, height=900):
    """Open a page once; return its HTML when it is drawn, and the messages of its console."""
    with tempfile.TemporaryDirectory() as home:
        window = (f"--user-data-dir={home}", f"--window-size={width},{height}", DRAWN)
        done = subprocess.run(
            [chromium(), *OPTIONS, *window, *(options or ["--dump-dom"]), url],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
