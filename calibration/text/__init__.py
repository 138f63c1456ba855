"""Text to calibrate and measure on: sources, how rows are read, which documents are drawn."""
