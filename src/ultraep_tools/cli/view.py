"""`ultraep view`: traces of finished or running jobs in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from ultraep.errors import ConfigError, FileError
from ultraep.files.writing import is_stream
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.options import option
from ultraep_tools.cli.terminal import print_error
from ultraep_tools.outputs import check_targets

if TYPE_CHECKING:
    from ultraep_tools.view.catalogue import Catalogue

EXAMPLE = (
    "Example: ultraep view run/\n\n"
    "Example: ultraep view run/ other/ --port 0 --open\n\n"
    "Example: ultraep view run/ --live\n\n"
    "Example: ultraep view run.npz --export run.html"
)


class ViewOptions(cli.Options):
    paths: list[Path] = cli.argument(
        "Traces (folders or files of `ultraep trace export --npz`), folders of traces, the output "
        "of a demo or an inspection, or a report. Several traces are compared.",
        "TRACE|DIR|REPORT...",
    )
    live: bool = cli.switch("Follow folders that a running job writes to.", "--live")
    host: str = option(
        "Address to listen on. If other machines can reach it, the page asks for the printed "
        "token.",
        default="127.0.0.1",
        metavar="ADDRESS",
    )
    port: int = option("Port to listen on; 0 picks a free one.", default=8750, metavar="N")
    open_browser: bool = cli.switch("Open a browser.", "--open")
    export: Path | None = option("Write one HTML file to share, and serve nothing.", metavar="FILE")
    force: bool = cli.force_option()


@cli.with_options
def command(options: ViewOptions) -> None:
    """Show traces in the browser: over time, layer by layer, down to one microbatch.

    By default only this machine can open the page. The page loads nothing from the network.
    """
    from ultraep_tools.report.page import require_plotly

    require_plotly()
    from ultraep_tools.view.api import write_page
    from ultraep_tools.view.catalogue import Catalogue

    if options.export is not None and options.live:
        raise ConfigError("--export writes the traces as they are now; remove --live")
    check_targets((options.export, "page"), force=options.force)
    catalogue = Catalogue(options.paths, live=options.live, warn=print_error)
    errors = [item.error for item in catalogue.items if item.error]
    for error in errors:
        print_error(error)
    if len(errors) == len(catalogue.items) and not options.live:
        raise FileError("nothing to show")
    try:
        if options.export is None:
            _serve(catalogue, options)
            return
        records = write_page(catalogue, options.export)
        if not is_stream(options.export):
            print(f"{options.export}: {records:,} records")
    finally:
        catalogue.close()


def _serve(catalogue: Catalogue, options: ViewOptions) -> None:
    from ultraep_tools.view.server import ViewServer

    catalogue.start()  # read while the server is set up
    server = ViewServer(catalogue, options.host, options.port)
    print(f"{server.url}  (Ctrl-C stops it)", flush=True)
    if options.open_browser:
        webbrowser.open(server.url)
    server.run()
