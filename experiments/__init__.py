"""What a user runs: run.py is the command; every experiment is one file here plus one YAML in conf/experiment."""
