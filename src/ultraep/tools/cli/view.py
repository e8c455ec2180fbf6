"""`ultraep view`: traces in the browser, of runs that are over or still running."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ultraep.errors import ConfigError, FileError
from ultraep.files.writing import check_targets, is_stream
from ultraep.tools.cli.options import Force
from ultraep.tools.cli.terminal import complain

if TYPE_CHECKING:
    from ultraep.tools.view.catalogue import Catalogue

EXAMPLE = (
    "Example: ultraep view run/\n\n"
    "Example: ultraep view run/ other/ --port 0 --open\n\n"
    "Example: ultraep view run/ --live\n\n"
    "Example: ultraep view run.npz --export run.html"
)
HOST, PORT = "127.0.0.1", 8750

Paths = Annotated[
    list[Path],
    Argument(
        metavar="TRACE|DIR|REPORT...",
        help="Traces (folders, or files of `ultraep trace export --npz`), folders of traces, the "
        "output of a demo or an inspection, or a report. Several traces are compared.",
        show_default=False,
    ),
]
Live = Annotated[bool, Option("--live", help="Follow folders that a running job writes to.")]
Host = Annotated[
    str,
    Option(
        metavar="ADDRESS",
        help="Address to listen on. Beyond this machine, the page asks for the printed token.",
    ),
]
Port = Annotated[int, Option(metavar="N", help="Port to listen on; 0: any that is free.")]
Open = Annotated[bool, Option("--open", help="Open a browser.")]
Export = Annotated[
    Path | None,
    Option(metavar="FILE", help="Write one HTML file to share instead; nothing is served."),
]


def command(
    paths: Paths,
    live: Live = False,
    host: Host = HOST,
    port: Port = PORT,
    open_browser: Open = False,
    export: Export = None,
    force: Force = False,
) -> None:
    """Look at traces in the browser: over time, layer by layer, down to one microbatch.

    The page is served to this machine only, and asks for nothing from elsewhere.
    """
    from ultraep.tools.view.catalogue import Catalogue

    if export is not None and live:
        raise ConfigError("--export writes what is there now: it does not go with --live")
    check_targets((export, "page"), force=force)
    catalogue = Catalogue(paths, live=live, warn=complain)
    for error in catalogue.errors:
        complain(error)
    if not catalogue.usable:
        raise FileError("none of this can be shown")
    if export is not None:
        _export(catalogue, export)
    else:
        _serve(catalogue, host, port, open_browser)


def _export(catalogue: Catalogue, path: Path) -> None:
    from ultraep.tools.view.export import write_page

    try:
        records = write_page(catalogue, path)
    finally:
        catalogue.close()
    if not is_stream(path):
        print(f"{path}: {records:,} records")


def _serve(catalogue: Catalogue, host: str, port: int, open_browser: bool) -> None:
    from ultraep.tools.view.server import ViewServer

    catalogue.start()  # read while the server is set up
    try:
        server = ViewServer(catalogue, host, port)
        print(f"{server.url}  (Ctrl-C ends it)", flush=True)
        if open_browser:
            webbrowser.open(server.url)
        server.run()
    finally:
        catalogue.close()
