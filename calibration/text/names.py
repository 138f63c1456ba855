"""The names that public data sets give to their columns and roles, and what is meant by them. Only tables; shapes.py uses them.

Names are compared without case and punctuation: `system_prompt`, `System Prompt` and `systemPrompt` are one name.
"""

import re
from typing import Any


def plain_name(name: Any) -> str:
    """A column's name as the tables below have it."""
    return re.sub(r"[\W_]+", "", str(name)).lower()


def _names(several: str) -> tuple[str, ...]:
    return tuple(several.split())


# Columns that hold whole conversations, the surest first. `data` and `items` are so called only if what is in them fits.
CONVERSATION = (
    *_names("messages conversations conversation dialogue dialog dialogues turns chat thread chatlog conversationa"),
    *_names("utterances qas mapping data items contents"),
)
ONLY_MESSAGES = ("items", "contents")  # a list of texts under these names is no conversation
SYSTEM = _names("system systemprompt systemmessage systeminstruction customsystemprompt")
TOOLS = _names("tools functions tooldefinitions apis")
HISTORY = ("history",)
# What the user says, what it is about, and what is answered.
PROMPT_ALONE = _names("prompt instruction question query problem")  # a user's turn even without an answer
PROMPT = (
    *PROMPT_ALONE,
    *_names("user human usermessage userprompt request input message utterance q ctx message1"),
)
QUESTIONS = _names("question query problem q")  # what these are about comes before them, as in an exam
QUESTIONS_IN_A_ROW = ("questions",)  # about one text, with as many answers
ABOUT = _names("input context passage background article document story evidence support knowledge")
OPTIONS = _names("choices options endings")
ANSWER = (
    *_names("chosen preferredoutput chosenresponse completion response answer answers output solution target reply"),
    *_names("assistant bot gpt correctanswer bestanswer finalanswer modelresponse modeloutput generation completions"),
    *_names("responses outputs generations response0 responsea answera message2 a answerkey"),
)
PREFERRED = _names("chosen preferredoutput chosenresponse")
SEVERAL = _names("answers completions responses generations outputs")  # of these the best is taken
REJECTED = _names("rejected nonpreferredoutput rejectedresponse response1 responseb answerb conversationb")
# Columns that hold one text.
TEXT = (
    *_names("text content document body article pagecontent message description fulltext rawcontent contents paragraph"),
    *_names("passage context story transcript comment review markdown code abstract sentence plaintext doc txt note notes"),
    *_names("summary dialogue conversation sentences paragraphs chosen input"),
)

# Of one message: who speaks, and what is said.
ROLE_KEYS = _names("role from speaker author sender type")
CONTENT_KEYS = _names("content value text message utterance parts body data")
REASONING_KEYS = _names("reasoning_content reasoning thinking")
# Where a logged request or response keeps its messages.
NESTED = _names("messages conversations conversation turns choices message body request response contents output")
SCORES = _names("overall_score score pm_score rating reward selected upvotes")  # of several answers, the best has the most

_SPEAKERS = {
    "user": "user human prompter customer client caller question instruction q patient",
    "assistant": "assistant gpt bot model ai chatgpt chatbot bing bard claude agent answer response a operator support doctor "
    "functioncall",
    "system": "system developer",
    "tool": "tool function observation toolresponse functionresponse ipython toolresult",
}
ROLES = {name: role for role, names in _SPEAKERS.items() for name in names.split()}
