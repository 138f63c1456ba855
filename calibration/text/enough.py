"""How many tokens static scales need, as measured (experiment=calibration_size; the table is in calibration/README.md)."""

ENOUGH = 10_000  # tokens: with three times as many, KL was still within a sixth of this one's
_MEASURED = ((1, "+1,620 %"), (100, "+2.2 %"), (1_000, "+0.17 %"), (ENOUGH, "+0.01 %"))  # perplexity


def shortage(tokens: int) -> str | None:
    """What too few tokens cost, in one line; None if there are enough."""
    if tokens >= ENOUGH:
        return None
    cost = ", ".join(f"{change} from {n:,}" for n, change in _MEASURED)
    return (
        f"the scales come from {tokens:,} token{'s' * (tokens != 1)}, fewer than {ENOUGH:,}: they are too narrow for other text. "
        f"Measured on SmolLM2-135M with int8, perplexity: {cost}. Calibrate on more text"
    )
