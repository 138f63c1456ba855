"""The names that public data sets give to their columns and roles, and what is meant by them. Only tables; shapes.py uses them.

Names are compared without case and punctuation: `system_prompt`, `System Prompt` and `systemPrompt` are one name.
"""

import re
from typing import Any


def plain_name(name: Any) -> str:
    """A column's name as the tables below have it."""
    return re.sub(r"[\W_]+", "", str(name)).lower()


# Columns that hold whole conversations, the surest first. `data` and `items` are so called only if what is in them fits.
CONVERSATION = (
    "messages",
    "conversations",
    "conversation",
    "dialogue",
    "dialog",
    "dialogues",
    "turns",
    "chat",
    "thread",
    "chatlog",
)
CONVERSATION += ("conversationa", "utterances", "qas", "mapping", "data", "items", "contents")
ONLY_MESSAGES = ("items", "contents")  # a list of texts under these names is no conversation
SYSTEM = ("system", "systemprompt", "systemmessage", "systeminstruction", "customsystemprompt")
TOOLS = ("tools", "functions", "tooldefinitions", "apis")
HISTORY = ("history",)
# What the user says, what it is about, and what is answered.
PROMPT = (
    "prompt",
    "instruction",
    "question",
    "query",
    "problem",
    "user",
    "human",
    "usermessage",
    "userprompt",
    "request",
    "input",
)
PROMPT += ("message", "utterance", "q", "ctx", "message1")
PROMPT_ALONE = ("prompt", "instruction", "question", "query", "problem")  # these are a user's turn even without an answer
QUESTIONS = ("question", "query", "problem", "q")  # what they are about comes before them, as in an exam
ABOUT = ("input", "context", "passage", "background", "article", "document", "story", "evidence", "support", "knowledge")
QUESTIONS_IN_A_ROW = ("questions",)  # about one text, with as many answers
OPTIONS = ("choices", "options", "endings")
ANSWER = ("chosen", "preferredoutput", "chosenresponse", "completion", "response", "answer", "answers", "output", "solution")
ANSWER += (
    "target",
    "reply",
    "assistant",
    "bot",
    "gpt",
    "correctanswer",
    "bestanswer",
    "finalanswer",
    "modelresponse",
    "modeloutput",
)
ANSWER += (
    "generation",
    "completions",
    "responses",
    "outputs",
    "generations",
    "response0",
    "responsea",
    "answera",
    "message2",
    "a",
    "answerkey",
)
REJECTED = ("rejected", "nonpreferredoutput", "rejectedresponse", "response1", "responseb", "answerb", "conversationb")
# Columns that hold one text.
TEXT = (
    "text",
    "content",
    "document",
    "body",
    "article",
    "pagecontent",
    "message",
    "description",
    "fulltext",
    "rawcontent",
    "contents",
)
TEXT += (
    "paragraph",
    "passage",
    "context",
    "story",
    "transcript",
    "comment",
    "review",
    "markdown",
    "code",
    "abstract",
    "sentence",
)
TEXT += (
    "plaintext",
    "doc",
    "txt",
    "note",
    "notes",
    "summary",
    "dialogue",
    "conversation",
    "sentences",
    "paragraphs",
    "chosen",
    "input",
)
IMAGES = ("image", "images", "video", "videos", "audio", "audios", "imagepath", "imagefile")

# Of one message: who speaks, and what is said.
ROLE_KEYS = ("role", "from", "speaker", "author", "sender", "type")
CONTENT_KEYS = ("content", "value", "text", "message", "utterance", "parts", "body", "data")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
NESTED = (
    "messages",
    "conversations",
    "conversation",
    "turns",
    "choices",
    "message",
    "body",
    "request",
    "response",
    "contents",
    "output",
)
SCORES = (
    "overall_score",
    "score",
    "pm_score",
    "rating",
    "reward",
    "selected",
    "upvotes",
)  # of several answers, the best has the most

ROLES = dict.fromkeys(
    ("user", "human", "prompter", "customer", "client", "caller", "question", "instruction", "q", "patient"), "user"
)
ROLES |= dict.fromkeys(
    ("assistant", "gpt", "bot", "model", "ai", "chatgpt", "chatbot", "bing", "bard", "claude", "agent"), "assistant"
)
ROLES |= dict.fromkeys(("answer", "response", "a", "operator", "support", "doctor", "functioncall"), "assistant")
ROLES |= dict.fromkeys(("system", "developer"), "system")
ROLES |= dict.fromkeys(("tool", "function", "observation", "toolresponse", "functionresponse", "ipython", "toolresult"), "tool")
