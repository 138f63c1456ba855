"""What several experiments measure alike: engines, served rows, divergence, significance, scales, sizes."""
