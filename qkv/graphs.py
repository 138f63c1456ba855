"""Decode steps as captured CUDA graphs: one per batch size of a ladder, replayed with the buffers' new content.

Takes: fixed buffers that hold a step of decodes. Gives: logits. Does not know about: requests, how the buffers are filled.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch

log = logging.getLogger(__name__)

Forward = Callable[[], torch.Tensor]
LADDER = (1, 2, 4)  # then multiples of 8: a step is padded to the next of these


class Captured(Protocol):
    """logits: the tensor that every replay writes anew."""

    logits: torch.Tensor

    def replay(self) -> None: ...


class DecodeGraphs:
    """forward(n): a call that runs the model over the first n rows of fixed buffers and returns logits [n, V].

    A graph is captured when its size is first needed, with every row a padding row: nothing is written then. If the model cannot
    be captured (it synchronises, or allocates what a graph cannot hold), that is logged once and every step runs as it is.
    """

    def __init__(
        self, forward: Callable[[int], torch.Tensor], largest: int, capture: Callable[[Forward], Captured] | None = None
    ):
        self._forward, self._capture = forward, capture or CudaGraph
        self.sizes = [n for n in LADDER if n < largest] + [*range(8, largest, 8), largest]
        self._graphs: dict[int, Captured] = {}
        self.failure: str | None = None  # why nothing is captured any more

    def size(self, decodes: int) -> int | None:
        """Rows of the graph for a step of so many decodes; None if it must run as it is."""
        if self.failure is not None:
            return None
        return next((n for n in self.sizes if n >= decodes), None)

    def prepare(self, rows: int) -> bool:
        """Capture the graph of that size if there is none yet. The buffers hold padding rows only, `rows` of them."""
        if rows not in self._graphs:
            try:
                self._graphs[rows] = self._capture(lambda: self._forward(rows))
            except Exception as error:
                self.failure = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("decode steps run without CUDA graphs: the model could not be captured (%s)", self.failure)
                return False
        return True

    def forget(self) -> None:
        """The model changed: graphs hold the addresses of the weights that it had, and the operators of its layers."""
        self._graphs, self.failure = {}, None

    def has(self, rows: int) -> bool:
        return rows in self._graphs

    def replay(self, rows: int) -> torch.Tensor:
        """Logits [rows, V], overwritten by the next replay of that size."""
        graph = self._graphs[rows]
        graph.replay()
        return graph.logits


class CudaGraph:
    """forward, captured after one run that compiles kernels and fills the libraries' workspaces."""

    def __init__(self, forward: Forward) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.logits = forward()

    def replay(self) -> None:
        self._graph.replay()
