"""`ultraep view`: traces of finished or running jobs in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from ultraep.errors import ConfigError, FileError
from ultraep.files.writing import check_targets, is_stream
from ultraep.tools.cli.options import Force, option
from ultraep.tools.cli.terminal import print_error

if TYPE_CHECKING:
    from ultraep.tools.view.catalogue import Catalogue

EXAMPLE = (
    "Example: ultraep view run/\n\n"
    "Example: ultraep view run/ other/ --port 0 --open\n\n"
    "Example: ultraep view run/ --live\n\n"
    "Example: ultraep view run.npz --export run.html"
)


def command(
    paths: Annotated[
        list[Path],
        Argument(
            metavar="TRACE|DIR|REPORT...",
            help="Traces (folders or files of `ultraep trace export --npz`), folders of traces, "
            "the output of a demo or an inspection, or a report. Several traces are compared.",
            show_default=False,
        ),
    ],
    live: Annotated[
        bool, option("Follow folders that a running job writes to.", flag="--live")
    ] = False,
    host: Annotated[
        str,
        option(
            "Address to listen on. If other machines can reach it, the page asks for the printed "
            "token.",
            metavar="ADDRESS",
        ),
    ] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on; 0 picks a free one.", metavar="N")] = 8750,
    open_browser: Annotated[bool, option("Open a browser.", flag="--open")] = False,
    export: Annotated[
        Path | None, option("Write one HTML file to share, and serve nothing.", metavar="FILE")
    ] = None,
    force: Force = False,
) -> None:
    """Show traces in the browser: over time, layer by layer, down to one microbatch.

    By default only this machine can open the page. The page loads nothing from the network.
    """
    from ultraep.tools.view.catalogue import Catalogue

    if export is not None and live:
        raise ConfigError("--export writes the traces as they are now; remove --live")
    check_targets((export, "page"), force=force)
    catalogue = Catalogue(paths, live=live, warn=print_error)
    for error in catalogue.errors:
        print_error(error)
    if not catalogue.usable:
        raise FileError("nothing to show")
    try:
        if export is None:
            _serve(catalogue, host, port, open_browser)
        else:
            _export(catalogue, export)
    finally:
        catalogue.close()


def _export(catalogue: Catalogue, path: Path) -> None:
    from ultraep.tools.view.export import write_page

    records = write_page(catalogue, path)
    if not is_stream(path):
        print(f"{path}: {records:,} records")


def _serve(catalogue: Catalogue, host: str, port: int, open_browser: bool) -> None:
    from ultraep.tools.view.server import ViewServer

    catalogue.start()  # read while the server is set up
    try:
        server = ViewServer(catalogue, host, port)
        print(f"{server.url}  (Ctrl-C stops it)", flush=True)
        if open_browser:
            webbrowser.open(server.url)
        server.run()
    finally:
        catalogue.close()
