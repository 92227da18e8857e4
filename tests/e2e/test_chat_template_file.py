"""A worker with `chat_template_file` renders chats with this file, not with the template of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.workers import only_worker

from llamaq.worker.engine.load_options import ModelOptions, RopeOptions
from llamaq.worker.process.model_fingerprint import fingerprint_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import StartWorker

TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[answer] "
CHAT: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
RENDERED = "[system] Be kind.\n[user] Hello\n[answer] "

LOG_BATCHES = """
import logging
import llama_cpp

_decode = llama_cpp.llama_decode

def decode(context, batch):
    logging.getLogger("llamaq.test").info("test.decoded tokens=%d", batch.n_tokens)
    return _decode(context, batch)

llama_cpp.llama_decode = decode
"""
"""Lets a worker log each batch. The hook's module is imported before the model is loaded."""


def test_the_template_of_the_file_renders_the_chats_of_a_worker(
    start_worker: StartWorker, chat_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    served = start_worker("template", chat_model, chat_template_file=file, rope_freq_base=20_000, patch=LOG_BATCHES)
    before_ready, _, _ = served.log.partition("worker.ready")
    assert before_ready.count("test.decoded tokens=1") == 1, "the warm-up of a worker"
    with served.client() as client:
        prompt = client.tokenize(RENDERED)
        result = client.chat(CHAT, max_tokens=2, prompt_logprobs=0)
        assert result.prompt_logprobs is not None
        assert list(result.prompt_logprobs.tokens) == prompt, "the prompt of a job"
        assert client.apply_template(CHAT) == RENDERED, "a text command"
        assert client.tokenize_chat(CHAT) == prompt
        assert client.tokenizer().apply_template(CHAT) == RENDERED, "a client with the vocabulary of the worker"
        card = only_worker(client).card
        assert card.chat_template == TEMPLATE
        rope = RopeOptions(freq_base=20_000.0)
        assert card.model_hash == fingerprint_model(chat_model, ModelOptions(), rope, TEMPLATE)
