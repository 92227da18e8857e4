"""A worker tokenizes, detokenizes and renders chats for clients that have no llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llamaq.producer import Client, InvalidRequest, NoWorker, Tokenizer

if TYPE_CHECKING:
    from tests.e2e.conftest import ServedQueue

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Hi <|im_end|>"}]},
]
PLAIN_CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <|im_end|>"}]


@pytest.fixture(scope="module")
def tokenizer(client: Client) -> Tokenizer:
    return client.tokenizer()


@pytest.mark.parametrize("text", ["Once upon a time", "😀 é 世界", "", "<|im_start|>user\nx"])
def test_a_worker_gives_the_tokens_of_llama_cpp(client: Client, tokenizer: Tokenizer, text: str) -> None:
    tokens = client.tokenize(text)
    assert tokens == tokenizer.encode(text)
    assert client.detokenize(tokens) == tokenizer.decode(tokens)


def test_a_worker_renders_and_tokenizes_a_chat(client: Client, tokenizer: Tokenizer) -> None:
    assert client.tokenize_chat(CHAT) == tokenizer.encode_chat(PLAIN_CHAT)
    rendered = client.apply_template(CHAT)
    assert "Be kind." in rendered
    assert rendered == tokenizer.apply_template(PLAIN_CHAT)


def test_a_worker_refuses_an_input_with_its_reason(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        client.detokenize([10**6])
    with pytest.raises(InvalidRequest, match="role"):
        client.apply_template([{"role": "USER!", "content": "x"}])
    with pytest.raises(InvalidRequest, match="max_request_bytes"):
        client.tokenize("x" * 5_000_000)


def test_no_worker_is_named(demo: ServedQueue, queue: str) -> None:
    with Client(demo.url, queue) as other, pytest.raises(NoWorker, match=queue):
        other.tokenize("x")


def test_the_text_of_a_command_is_not_in_the_log_of_the_worker(client: Client, demo: ServedQueue) -> None:
    client.tokenize("a very private text")
    assert "text_command.done action=tokenize" in demo.log
    assert "private" not in demo.log
