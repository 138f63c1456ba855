"""Compares rows by their bits: the mean effective bits of a row, and the rows that no row of fewer bits beats."""

from collections.abc import Sequence
from typing import Any


def bits(row: dict[str, Any]) -> float:
    """The mean of the row's effective bits of K and of V."""
    return float((row["memory"]["effective_bits_k"] + row["memory"]["effective_bits_v"]) / 2)


def on_frontier(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those rows that have a smaller KL divergence than every row before them. rows: sorted by bits."""
    best: list[dict[str, Any]] = []
    for row in rows:
        if not best or row["accuracy"]["kl_divergence"] < best[-1]["accuracy"]["kl_divergence"]:
            best.append(row)
    return best
