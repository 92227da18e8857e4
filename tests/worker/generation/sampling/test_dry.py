from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.llama_samplers import LlamaSampler, llama_dry

from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.generation.sampling.candidates import Candidates, Logits
from llamaq.worker.generation.sampling.dry import Dry
from llamaq.worker.generation.sampling.sequence_breakers import BreakerFinder, SequenceBreakers

BREAKERS = ("\n", ":", "the", "ing of", "é")
WORDS = ["The", "the thing", "a", "sing", "ing", "of", "of a", "\n", ":", "then", " the", "é", "and"]


@pytest.fixture(scope="module")
def finder(vocab: Vocab) -> BreakerFinder:
    return BreakerFinder(vocab)


@pytest.fixture(scope="module")
def few_tokens(vocab: Vocab) -> list[int]:
    """Tokens of texts with and without breakers, so that random histories have both repetitions and breakers."""
    return sorted({token for word in WORDS for token in vocab.encode_part(word)})


def penalties(dry: Dry, history: list[int], tokens: list[int]) -> Logits:
    """Return by how much DRY lowers the logits of these tokens."""
    logits = np.zeros(len(tokens), np.float32)
    dry.penalize(Candidates(logits, np.array(tokens)), history)
    lowered: Logits = -logits
    return lowered


@given(
    picks=st.lists(st.integers(0, 20), min_size=1, max_size=70),
    split=st.integers(1, 70),
    last_n=st.sampled_from([-1, 0, 5, 20, 64]),
    allowed=st.integers(0, 4),
    base=st.sampled_from([1.0, 1.5, 3.0]),
    breakers=st.sets(st.sampled_from(BREAKERS)),
    variety=st.sampled_from([1, 2, 3, 20]),
)
@settings(max_examples=30)
@example([0, 1] * 30, 20, 64, 2, 1.75, set(), 20)
def test_dry_lowers_logits_as_llama_cpp_does(
    vocab: Vocab,
    finder: BreakerFinder,
    few_tokens: list[int],
    picks: list[int],
    split: int,
    last_n: int,
    allowed: int,
    base: float,
    breakers: set[str],
    variety: int,
) -> None:
    history = [few_tokens[pick % variety % len(few_tokens)] for pick in picks]
    params = SamplingDefaults(dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last_n)
    dry = Dry(params, finder.breakers(sorted(breakers)))
    for n in range(min(split, len(history)), len(history)):
        penalties(dry, history[:n], few_tokens)  # the state grows token by token
    last = len(history) if last_n < 0 else last_n  # -1 is the size of the context in llama-server
    llama = LlamaSampler(llama_dry(vocab.pointer, 0.8, base, allowed, last, sorted(breakers)))
    llama.accept(history)
    lowered, _ = llama.apply(dict.fromkeys(few_tokens, 0.0))
    llama.close()
    expected = -np.array([lowered[token] for token in few_tokens], np.float32)
    found = penalties(dry, history, few_tokens)
    assert np.flatnonzero(found).tolist() == np.flatnonzero(expected).tolist()
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("text", ["\n", "the", "ing of", " a", "zq"])
def test_breakers_are_the_tokens_that_llama_cpp_finds(vocab: Vocab, finder: BreakerFinder, text: str) -> None:
    breakers, plain = finder.breakers([text]), vocab.encode_part("You")[-1]
    singles = [token for token in range(vocab.n_tokens) if breakers.is_single(token)]
    params = SamplingDefaults(dry_multiplier=1, dry_allowed_length=1)
    tried = {token for word in WORDS for token in vocab.encode_part(word)} | set(singles[:5])
    llama = LlamaSampler(llama_dry(vocab.pointer, 1, params.dry_base, 1, 64, [text]))
    for token in tried:
        history = [plain, token, plain, token]
        llama.reset()
        llama.accept(history)
        lowered, _ = llama.apply(dict.fromkeys([plain, token], 0.0))
        candidates = Candidates(np.zeros(2, np.float32), np.array([plain, token]))
        Dry(params, breakers).penalize(candidates, history)
        assert candidates.logits.tolist() == pytest.approx([lowered[plain], lowered[token]], rel=1e-5)
    llama.close()


def test_a_long_repetition_does_not_exceed_the_range_of_logits() -> None:
    params = SamplingDefaults(dry_multiplier=100, dry_base=100, dry_penalty_last_n=-1)
    logits = np.zeros(3, np.float32)
    Dry(params, SequenceBreakers()).penalize(Candidates(logits), [1] * 3000)
    assert logits[1] == pytest.approx(-1e30)
    assert logits[[0, 2]].tolist() == [0, 0]


def test_dry_after_a_filter_lowers_only_its_candidates() -> None:
    params = SamplingDefaults(dry_multiplier=1, dry_allowed_length=1)
    candidates = Candidates(np.array([3, 2], np.float32), np.array([7, 1]), is_sorted=True)
    lowered = Dry(params, SequenceBreakers()).penalize(candidates, [7, 1, 5, 7, 1, 5, 7])
    assert lowered.tokens is not None
    assert dict(zip(lowered.tokens.tolist(), lowered.logits.tolist(), strict=True)) == pytest.approx(
        {7: 3.0, 1: 2 - 1.75**3}
    )
    assert not lowered.is_sorted


def test_texts_of_breakers_longer_than_40_bytes_are_cut(finder: BreakerFinder) -> None:
    assert finder.breakers(["the" + "é" * 40]).max_tail == finder.breakers(["the" + "é" * 18]).max_tail


def test_the_heads_of_breakers_take_four_bytes_each(finder: BreakerFinder) -> None:
    found = [*finder._of_text("e"), *finder._of_text("the")]
    n_heads = sum(len(heads) for _, heads in found)
    assert n_heads > len(found) > 1
    assert sum(memoryview(heads).nbytes for _, heads in found) == 4 * n_heads


def test_without_breakers_no_tail_ends_anywhere() -> None:
    breakers = SequenceBreakers()
    assert breakers.tail_before([5, 6], 2) is None
    assert not breakers.is_single(5)
