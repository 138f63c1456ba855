"""lm-eval on the engine: the model `qkv`, and lm-eval's command line that knows it (`python -m experiments.lm`). Importing this
imports nothing; lm-eval is an extra (pip install 'qkv[eval]')."""
