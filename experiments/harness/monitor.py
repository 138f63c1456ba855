"""Looking at a run while it runs: a Prometheus endpoint and a live view in the terminal, both optional.

Takes: settings; the engine that runs now. Gives: nothing back. Both read counters from their own thread and touch nothing else.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from qkv.engine import Engine
from qkv.metrics import prometheus
from qkv.validate import require

Ui = Literal["none", "live"]


@dataclass(frozen=True)
class MetricsSettings:
    """port: of http://127.0.0.1:port/metrics while something runs; null: no endpoint."""

    port: int | None = None

    def __post_init__(self) -> None:
        require(self.port is None or 0 <= self.port <= 65535, "port", self.port, "0 to 65535, or null")


class Monitor:
    """What is shown of the engine that runs now."""

    def __init__(self, settings: MetricsSettings, ui: Ui) -> None:
        self.settings, self.ui = settings, ui
        self._engine: Engine | None = None
        self._last = (0.0, 0)

    def watch(self, engine: Engine) -> None:
        """Show this engine from now on."""
        self._engine, self._last = engine, (engine.clock(), 0)

    def metrics(self) -> dict[str, Any]:
        """Of the watched engine; {} without one, or when it changed while being read."""
        try:
            return self._engine.metrics() if self._engine is not None else {}
        except (RuntimeError, ZeroDivisionError):  # a container changed size under us: the next look will do
            return {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Endpoint and view are up inside. Neither stops a run that they cannot show."""
        with ExitStack() as stack:
            if self.settings.port is not None and (stop := prometheus.start(self.settings.port, self.metrics)):
                stack.callback(stop)
            if self.ui == "live" and sys.stderr.isatty():
                from rich.console import Console
                from rich.live import Live

                screen = Console(stderr=True)
                shared = sys.stdout.isatty()  # what is printed goes above the view; into a file or a pipe it stays itself
                live = Live(
                    get_renderable=self.view, console=screen, refresh_per_second=4, transient=True, redirect_stdout=shared
                )
                stack.enter_context(live)
            yield

    def view(self) -> Any:
        """A few lines: pool, hits, queue, preemptions, tokens/s."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        metrics = self.metrics()
        table = Table.grid(padding=(0, 2))
        if not metrics or self._engine is None:
            table.add_row("nothing runs yet")
            return table
        memory, cache, requests = metrics["memory"], metrics["cache"], metrics["requests"]
        now, tokens = self._engine.clock(), metrics["tokens"]["decode"]
        before, counted = self._last
        rate = (tokens - counted) / (now - before) if now > before else 0.0
        self._last = (now, tokens)
        table.add_row(
            "pool", ProgressBar(total=1.0, completed=memory["utilization_now"], width=30), f"{memory['utilization_now']:.0%}"
        )
        table.add_row("prefix hits", f"{cache.get('hit_rate', 0.0):.1%}", f"{cache['evictions']:,} evictions")
        table.add_row("requests", f"{requests['running']} running", f"{requests['waiting']} waiting")
        table.add_row("preemptions", f"{cache['preemptions']:,}", f"{cache['swap_bytes'] / 2**20:,.0f} MiB swapped")
        table.add_row("decode", f"{rate:,.0f} tokens/s", time.strftime("%H:%M:%S"))
        return table
