"""What the YAML files beside this one name with `!function load.…`: experiments.tasks, wherever lm-eval was started from."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(path) for path in (_ROOT, _ROOT / "kernels") if str(path) not in sys.path]

from experiments.tasks import dialogue, reading, ruler, tool_call  # noqa: E402
from experiments.tasks.custom import Custom  # noqa: E402

long_text, next_passage, last_word = reading.long_text, reading.next_passage, reading.last_word
conversation, score_conversation = dialogue.conversation, dialogue.score
tool_requests, score_tool_call = tool_call.requests, tool_call.score
niah_single_1, niah_multikey_2, vt, cwe, fwe = ruler.niah_single_1, ruler.niah_multikey_2, ruler.vt, ruler.cwe, ruler.fwe
score_ruler = ruler.score

__all__ = ["Custom"]
