"""Tools that examine the Triton kernels: cases to run them on, the cards they are compiled for, timing, machine code."""
