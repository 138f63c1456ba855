"""Accuracy tasks for lm-eval that need no network: for each file in conf/tasks, a function in this package builds its documents.

Takes: lm-eval's task metadata as keywords. Gives: documents, the same for the same settings. Does not know about: engines.
"""
