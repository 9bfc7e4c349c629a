"""The command `monitor`: a live table in the terminal and a page for the browser."""

import argparse
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from scripts.lib.ground.errors import StageError
from scripts.lib.watching.found import Found, find
from scripts.lib.watching.page import serving
from scripts.lib.watching.screen import table

SECONDS = 1.0


def monitor(doc: str) -> None:
    """Parse the command line and show what is at work, once or until it is interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.monitor", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", help="only the jobs of this run")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--port", type=int, default=8400, help="of the page on this machine; 0 takes a free one")
    parser.add_argument("--once", action="store_true", help="print the table and end")
    options = parser.parse_args()
    console = Console()
    if options.once:
        console.print(table(lines(find(options.results, options.run))))
        return
    try:
        server = serving(lambda: find(options.results, options.run), options.port)
    except OSError as error:
        raise StageError(f"port {options.port}: {error.strerror}; choose another with --port, 0 takes a free one") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    console.print(f"http://127.0.0.1:{server.server_port}/ (end with Ctrl-C)")
    watch(console, options.results, options.run)


def watch(console: Console, results: Path, run: str | None) -> None:
    """Keep the table current until Ctrl-C; without a terminal only the page is served."""
    try:
        if not console.is_terminal:
            threading.Event().wait()
        with Live(console=console, refresh_per_second=2) as view:
            while True:
                view.update(table(lines(find(results, run))))
                time.sleep(SECONDS)
    except KeyboardInterrupt:
        pass


def lines(jobs: list[Found]) -> list[tuple[str, dict[str, object]]]:
    """Jobs as lines of a table."""
    return [(f"{job.run}: {job.label}", dict(job.figures)) for job in jobs]
