"""The numbers of 4-bit floats with 2 exponent bits and 1 mantissa bit (E2M1, OCP Microscaling Formats 1.0), as a codebook."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = _MAGNITUDES[-1]
E2M1 = (*(-x for x in reversed(_MAGNITUDES)), *_MAGNITUDES)  # ascending; both zeros are 0
