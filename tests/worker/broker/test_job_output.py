"""The events with the tokens of a job that several attempts have generated."""

from __future__ import annotations

import pytest

from llamaq.common.protocol import codec
from llamaq.common.protocol.job_events import TokenSpan
from llamaq.worker.broker.job_output import JobOutput


@pytest.mark.parametrize("offset", range(6))
@pytest.mark.parametrize(
    "probabilities",
    [[None, None, 0.5, 0.25, 0.5], [0.5, 0.25, None, None, None]],
    ids=["drawn with Mirostat from the third token on", "drawn with Mirostat up to the second token"],
)
def test_tokens_of_attempts_of_which_one_used_mirostat_are_published(
    probabilities: list[float | None], offset: int
) -> None:
    output = JobOutput()
    for token, probability in enumerate(probabilities):
        output.add(token, "x", draw_probability=probability)
    span = codec.decode_streamed(output.encode_from(offset, ""))
    assert isinstance(span, TokenSpan)
    assert (span.tokens, span.draws) == (tuple(range(offset, 5)), ())


def test_the_probabilities_of_the_draws_are_published_if_all_are_known() -> None:
    output = JobOutput()
    for token in range(3):
        output.add(token, "x", draw_probability=0.5)
    span = codec.decode_streamed(output.encode_from(1, ""))
    assert isinstance(span, TokenSpan)
    assert span.draws == (0.5, 0.5)
