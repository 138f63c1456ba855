"""Text and statistics for calibrating quantizers: data sources (data.py) and collection (collect.py)."""
