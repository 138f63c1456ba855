"""How many tokens static scales need, as measured (experiment=calibration_size; the table is in calibration/README.md)."""

ENOUGH = 10_000  # tokens
_MEASURED = ((1, "+1 % perplexity"), (100, "+1 %"), (1_000, "+1 %"))


def shortage(tokens: int) -> str | None:
    """What too few tokens cost, in one line; None if there are enough."""
    if tokens >= ENOUGH:
        return None
    cost = "; ".join(f"{n:,} token{'s' * (n > 1)}: {what}" for n, what in _MEASURED)
    return (
        f"the scales come from {tokens:,} token{'s' * (tokens != 1)}, fewer than {ENOUGH:,}: too narrow for other text. "
        f"Measured on SmolLM2-135M with int8: {cost}. Calibrate on more text"
    )
