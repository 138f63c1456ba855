"""Kernels looked at from outside: cases to run them on, the cards they are compiled for, timing, machine code."""
