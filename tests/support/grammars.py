"""Grammars that are compiled without the sandbox, and what they allow."""

from __future__ import annotations

import llguidance

from llamaq.common.errors import JobRejected
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.grammar.gbnf_to_lark import gbnf_to_lark
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer, TokenConstraint


def constraint_of(vocab: Vocab, gbnf: str, root: str = "root") -> TokenConstraint:
    """Compile a grammar in GBNF without the sandbox."""
    return ConstraintTokenizer(vocab).compile(llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(gbnf, root)))


def token_of(vocab: Vocab, text: str) -> int:
    """Return the token with this text."""
    return next(token for token in range(vocab.n_tokens) if vocab.piece(token) == text.encode())


def allows(constraint: TokenConstraint, token: int | None) -> bool:
    return (token or 0) in constraint.allowed_tokens()


def is_whole_output(vocab: Vocab, compiled: str, text: str) -> bool:
    """Return whether a compiled grammar allows the text, byte by byte, and an end token after it."""
    pieces = {vocab.piece(token): token for token in range(vocab.n_tokens)}
    constraint = ConstraintTokenizer(vocab).compile(compiled)
    try:
        constraint.accept([pieces[bytes([byte])] for byte in text.encode()])
    except JobRejected:
        return False
    return allows(constraint, vocab.eos)
