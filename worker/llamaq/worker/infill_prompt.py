"""Makes the prompt of a text with a gap that the model fills (fill in the middle, FIM).

The order of the parts is that of llama-server's `/infill`: first other texts, then the text before the gap, the text
after the gap, and the token after which the model writes what belongs into the gap. Only BOS has another place. Here it
is the first token, and there it follows the other texts.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamaq.common.errors import ErrorCode, JobRejected
from llamaq.common.protocol.text_commands import Infill, Snippet
from llamaq.common.vocab.text_tokenizer import TextTokenizer
from llamaq.common.vocab.token_table import InfillTokens

MAX_TEXT_TOKENS = 2048
"""Largest number of tokens of the text around the gap: the default batch of llama-server. In a shorter context, it is
half of the context, so that the gap has room too."""
PREFIX_QUARTERS = 3
"""How many quarters of this number the text before the gap may have."""
DEFAULT_GAP_TOKENS = 512
"""Number of tokens that snippets leave free for the gap, if its largest size is not known."""
REPOSITORY_NAME, FILE_NAME = "myproject\n", "filename\n"
"""The names that llama-server gives to the repository and to the file with the gap."""
SNIPPET_HEADING = "\n\n--- snippet ---\n\n"
"""Stands before a snippet, if the model has no token for files."""


def encode_infill(tokenizer: TextTokenizer, infill: Infill, context_limit: int) -> list[int]:
    """Return the tokens of a prompt with a gap.

    The texts of special tokens inside the texts stay text.

    Args:
        tokenizer: The tokenizer of the model.
        infill: The text with the gap.
        context_limit: Largest number of tokens of a job, prompt included.

    Raises:
        JobRejected: The model was not trained to fill gaps, or llama.cpp cannot tokenize a text.
    """
    special = tokenizer.infill_tokens
    if special is None:
        message = "this model does not fill gaps (infill, suffix): it has no tokens for the parts of a text with a gap"
        raise JobRejected(ErrorCode.INVALID_REQUEST, message)
    n_text = min(MAX_TEXT_TOKENS, context_limit // 2)
    begun = tokenizer.encode_part(infill.begun)
    before = _last(tokenizer.encode_part(infill.prefix), n_text * PREFIX_QUARTERS // 4)
    after = tokenizer.encode_part(infill.suffix)[: max(0, n_text // 4 - 2 - len(begun))]
    text = [special.prefix, *before, *begun, special.suffix, *after, special.middle]
    first = [tokenizer.bos] if tokenizer.adds_bos and tokenizer.bos is not None else []
    n_free = context_limit - len(first) - len(text) - (infill.max_tokens or DEFAULT_GAP_TOKENS)
    return [*first, *_last(_encode_snippets(tokenizer, special, infill.snippets), n_free), *text]


def _encode_snippets(tokenizer: TextTokenizer, special: InfillTokens, snippets: Sequence[Snippet]) -> list[int]:
    """Return the tokens before the text with the gap: the other texts, each with its name."""
    tokens: list[int] = []
    if special.repository is not None:
        tokens += [special.repository, *tokenizer.encode_part(REPOSITORY_NAME)]
    for snippet in snippets:
        if special.file is None:
            tokens += tokenizer.encode_part(SNIPPET_HEADING)
        else:
            tokens += [special.file, *tokenizer.encode_part(f"{snippet.filename}\n")]
        tokens += tokenizer.encode_part(snippet.text)
    if special.file is not None:
        tokens += [special.file, *tokenizer.encode_part(FILE_NAME)]
    return tokens


def _last(tokens: list[int], n_tokens: int) -> list[int]:
    """Return the last `n_tokens` of the tokens. None of them if the number is not positive."""
    return tokens[-n_tokens:] if n_tokens > 0 else []
