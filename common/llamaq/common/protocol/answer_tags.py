"""The tags that models write around reasoning and calls of tools.

In many vocabularies a tag is a token of its own. With such a model, only this token is the tag. An answer may also
write the text of the tag with other tokens, for example to explain or quote the format. Then it is ordinary text. In
other vocabularies, the text is the tag.
"""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MISTRAL_THINK_OPEN, MISTRAL_THINK_CLOSE = "[THINK]", "[/THINK]"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
MISTRAL_CALLS, MISTRAL_CALL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PYTHON_TAG = "<|python_tag|>"
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

ANSWER_TAGS = (
    *(THINK_OPEN, THINK_CLOSE, MISTRAL_THINK_OPEN, MISTRAL_THINK_CLOSE),
    *(CALL_OPEN, CALL_CLOSE, MISTRAL_CALLS, MISTRAL_ARGUMENTS, PYTHON_TAG),
    *(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN),
)
