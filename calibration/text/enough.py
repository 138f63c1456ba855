"""How many tokens static scales need, as measured (experiment=calibration_size; the table is in calibration/README.md)."""

ENOUGH = 10_000  # tokens


def shortage(tokens: int) -> str | None:
    """What too few tokens cost, in one line; None if there are enough."""
    return None if tokens >= ENOUGH else f"{tokens:,} tokens"
