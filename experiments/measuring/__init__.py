"""Measurements that several experiments share: engines, served rows, divergence, significance, scales, sizes."""
