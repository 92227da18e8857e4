"""Checks that a draft model has the vocabulary of the model that verifies its drafts.

The rules are those of llama.cpp (`common/speculative.cpp`): models of one family often have different numbers of unused
tokens at the end, and name the first tokens differently.
"""

from __future__ import annotations

from llamaq.common.errors import ModelError
from llamaq.common.vocab.llama_vocab import Vocab

MAX_SIZE_DIFFERENCE = 128
"""Largest difference between the two numbers of tokens."""
FIRST_COMPARED = 5
"""Id of the first token whose text is compared."""


def check_draft_vocabulary(target: Vocab, draft: Vocab) -> None:
    """Check that tokens of the draft model have the same meaning in the target model.

    Raises:
        ModelError: The vocabularies differ. The message names the first difference.
    """
    difference = _difference(target, draft)
    if difference is not None:
        raise ModelError(
            f"--model-draft: this model does not have the vocabulary of --model: {difference}. Choose a smaller model "
            "of the same family, or --speculation ngram, which needs no draft model"
        )


def _difference(target: Vocab, draft: Vocab) -> str | None:
    """Return the first difference that these rules do not allow. None: there is none."""
    if target.kind != draft.kind:
        return f"its tokenizer has type {draft.kind}, not {target.kind}"
    for name, of_target, of_draft in (
        ("BOS", target.bos if target.adds_bos else None, draft.bos if draft.adds_bos else None),
        ("EOS", target.eos if target.adds_eos else None, draft.eos if draft.adds_eos else None),
    ):
        if of_target != of_draft:
            return f"the {name} token that is added to a text is {of_draft}, not {of_target}"
    if abs(target.n_tokens - draft.n_tokens) > MAX_SIZE_DIFFERENCE:
        return f"it has {draft.n_tokens} tokens, and the model has {target.n_tokens}"
    for token in range(FIRST_COMPARED, min(target.n_tokens, draft.n_tokens)):
        if target.token_text(token) != draft.token_text(token):
            return f"token {token} is {draft.token_text(token)!r}, not {target.token_text(token)!r}"
    return None
