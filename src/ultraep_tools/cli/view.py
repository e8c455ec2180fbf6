"""`ultraep view`: traces of finished or running jobs in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from ultraep.errors import FileError
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.options import option
from ultraep_tools.cli.terminal import print_error
from ultraep_tools.outputs import check_targets

EXAMPLE = (
    "Example: ultraep view run/\n\n"
    "Example: ultraep view run/ other/ --port 0 --open\n\n"
    "Example: ultraep view run/ other/ --export comparison.html"
)


class ViewOptions(cli.Options):
    paths: list[Path] = cli.argument(
        "Traces (folders or files of `ultraep trace export --npz`), or folders of traces, such as "
        "the output of a demo. Several traces are compared.",
        "TRACE|DIR...",
    )
    port: int = option("Port to listen on; 0 picks a free one.", default=8750, metavar="N")
    open_browser: bool = cli.switch("Open a browser.", "--open")
    export: Path | None = option("Write one HTML file to share, and serve nothing.", metavar="FILE")
    force: bool = cli.force_option()


@cli.with_options
def command(options: ViewOptions) -> None:
    """Show traces in the browser: over time, layer by layer, down to one microbatch.

    Only this machine can open the page. The page loads nothing from the network. Reload it to see
    what a running job has written since.
    """
    from ultraep_tools.report.page import require_plotly

    require_plotly()
    from ultraep_tools.view.api import write_page
    from ultraep_tools.view.catalogue import Catalogue
    from ultraep_tools.view.server import ViewServer

    check_targets(options.export, force=options.force)
    catalogue = Catalogue(options.paths)
    errors = [item.error for item in catalogue.items if item.error]
    for error in errors:
        print_error(error)
    if len(errors) == len(catalogue.items):
        raise FileError("nothing to show")
    if options.export is None:
        server = ViewServer(catalogue, options.port)
        print(f"{server.url}  (Ctrl-C stops it)", flush=True)
        if options.open_browser:
            webbrowser.open(server.url)
        server.run()
        return
    records = write_page(catalogue, options.export)
    for note in (note for item in catalogue.items if item.trace for note in item.trace.notes):
        print_error(note)
    print(f"{options.export}: {records:,} records")
