"""lm-eval on the engine: the model `qkv`, and lm-eval's command line with this model (`python -m experiments.lm`). Importing the
package imports none of its modules, since lm-eval is an extra (pip install 'qkv[eval]')."""
