"""Accuracy tasks that need no network, for lm-eval: each function here builds the documents of one file in conf/tasks.

Takes: lm-eval's task metadata as keywords. Gives: documents, the same for the same settings. Does not know about: engines.
"""
