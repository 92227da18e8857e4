"""The tokens of a query and a document, as a model for reranking reads them."""

from __future__ import annotations

import re

from llamaq.common.vocab.llama_vocab import Vocab

_PLACEHOLDER = re.compile(r"(\{query\}|\{document\})")


def encode_pair(vocab: Vocab, query: str, document: str, *, max_tokens: int | None = None) -> list[int]:
    """Return the tokens of a query and a document, with the text or the special tokens that the model expects.

    The result equals that of llama-server (`format_prompt_rerank`), with one exception: the text of a special token
    inside the query or the document stays text.

    Args:
        vocab: The vocabulary of the model.
        query: The query.
        document: The document.
        max_tokens: As in `Vocab.encode`.

    Raises:
        JobRejected: As in `Vocab.encode`.
    """
    if vocab.rerank_template is not None:
        return _fill_template(vocab, vocab.rerank_template, query, document, max_tokens)
    after_query, after_document = vocab.separators
    return [
        *([vocab.bos] if vocab.adds_bos and vocab.bos is not None else []),
        *vocab.encode_part(query, parse_special=False, max_tokens=max_tokens),
        *after_query,
        *vocab.encode_part(document, parse_special=False, max_tokens=max_tokens),
        *after_document,
    ]


def _fill_template(vocab: Vocab, template: str, query: str, document: str, max_tokens: int | None) -> list[int]:
    values = {"{query}": query, "{document}": document}
    parts = _PLACEHOLDER.split(template)
    if not any(map(vocab.special_tokens.find, values.values())):
        whole = "".join(values.get(part, part) for part in parts)
        return vocab.encode_part(whole, parse_special=True, max_tokens=max_tokens)
    tokens: list[int] = []
    for part in parts:
        text = values.get(part, part)
        tokens += vocab.encode_part(text, parse_special=part not in values, max_tokens=max_tokens)
    return tokens
