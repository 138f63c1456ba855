"""Where results go besides record.json: base.py says what a logger is, and every other file is one, chosen by logger=NAME."""
