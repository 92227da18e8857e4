"""Calls that ask a worker for tokens, for texts, and for the form of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from llamaq.common.errors import NoWorker
from llamaq.common.protocol.job_options import JobOptions
from llamaq.common.protocol.queue_and_worker_state import WorkerCard
from llamaq.common.protocol.text_commands import Snippet, TextAction
from llamaq.common.settings import ClientSettings
from llamaq.producer.answer_forms import AnswerForms
from llamaq.producer.calls.calls_base import Messages
from llamaq.producer.calls.queue_calls import QueueCalls
from llamaq.producer.chat_answers import ChatAnswers, read_form
from llamaq.producer.queries import text_commands
from llamaq.producer.tokenizer import Tokenizer, load_tokenizer


class TextCalls(QueueCalls):
    """Calls that ask a worker for tokens, for texts, and for the form of answers."""

    def __init__(self, settings: ClientSettings) -> None:
        super().__init__(settings)
        self._answer_forms = AnswerForms(self._card)

    async def chat_answers(
        self,
        messages: Messages,
        *,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        **options: Unpack[JobOptions],
    ) -> ChatAnswers:
        """Return an object that separates reasoning, calls of tools and content in the model's answers to a chat.

            answers = client.chat_answers(messages, tools=tools)
            answer = answers.read(client.chat(messages, **answers.options))
            print(answer.reasoning, answer.content, answer.tool_calls)

        The parts of a stream are `answers.parts(client.stream_chat(messages, **answers.options))`.

        Args:
            messages: The messages, oldest first.
            tool_choice: `auto`: the model decides whether it calls a tool. `none`: it has no tools. `required`, or
                `{"type": "function", "function": {"name": NAME}}`: it must call a tool, or this tool.
            parallel_tool_calls: Whether an answer may have several calls. If not, the first one counts.
            **options: Job options for the chat, `tools` among them; `JobParams` documents each of them.

        Returns:
            The object. Its `options` are the job options for the chat, and its methods split the answer.

        Raises:
            InvalidRequest: The tools or their choice are not valid.
            NoWorker: No worker serves the queue.
        """
        choice = {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}
        return await read_form(self._answer_forms, self.connection, messages, options, choice)

    async def tokenize(self, text: str, *, timeout: float | None = None) -> list[int]:
        """Return the tokens of a text prompt, as a worker of the queue tokenizes it. llama.cpp is not needed here.

        Args:
            text: The text of the prompt. Special tokens in it are parsed.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The token ids. They start with the BOS token if the model's metadata requires it.

        Raises:
            InvalidRequest: The text is larger than `max_request_bytes`, or llama.cpp cannot tokenize it.
            NoWorker: No worker serves the queue.
            WorkerEnded: The worker ended before it replied, and the queue has no other worker.
            ResultTimeout: The reply did not arrive in time.
        """
        return list((await text_commands.ask(self.connection, TextAction.TOKENIZE, timeout, text=text)).tokens)

    async def tokenize_chat(self, messages: Messages, *, timeout: float | None = None) -> list[int]:
        """Return the tokens of a chat, as a worker of the queue renders and tokenizes it.

        Args:
            messages: The messages, oldest first. Special tokens in their contents are treated as text.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The token ids of the whole prompt.

        Raises:
            LlamaqError: The same errors as `tokenize`.
        """
        reply = await text_commands.ask(self.connection, TextAction.TOKENIZE, timeout, messages=messages)
        return list(reply.tokens)

    async def tokenize_infill(
        self,
        prefix: str,
        suffix: str,
        *,
        begun: str = "",
        snippets: Sequence[Snippet] = (),
        max_tokens: int | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """Return the tokens of a prompt after which the model writes what belongs between two texts.

            tokens = client.tokenize_infill("def add(a, b): ", " # the sum", max_tokens=64)
            result = client.generate_tokens(tokens, max_tokens=64)

        Args:
            prefix: The text before the gap. If it is too long, its last 1,536 tokens are used.
            suffix: The text after the gap. If it is too long, its first 512 tokens are used.
            begun: The beginning of what belongs into the gap.
            snippets: Other texts that the model reads before. The last ones are used if the context has no room for
                all.
            max_tokens: Largest number of tokens that the job will generate. Snippets leave room for them.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The token ids of the whole prompt.

        Raises:
            InvalidRequest: The model was not trained to fill gaps, or the texts are larger than `max_request_bytes`.
            LlamaqError: The other errors of `tokenize`.
        """
        infill = {"prefix": prefix, "suffix": suffix, "begun": begun, "snippets": snippets, "max_tokens": max_tokens}
        return list((await text_commands.ask(self.connection, TextAction.INFILL, timeout, infill=infill)).tokens)

    async def detokenize(self, tokens: Sequence[int], *, timeout: float | None = None) -> str:
        """Return the text of tokens, as a job of the queue streams it. Control tokens have no text.

        Args:
            tokens: Token ids of the model's vocabulary.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Raises:
            InvalidRequest: A token id is not in the vocabulary.
            LlamaqError: The other errors of `tokenize`.
        """
        return (await text_commands.ask(self.connection, TextAction.DETOKENIZE, timeout, tokens=tokens)).text

    async def apply_template(self, messages: Messages, *, timeout: float | None = None) -> str:
        """Return a chat as text, rendered with the chat template of the queue's model.

        Args:
            messages: The messages, oldest first.
            timeout: Longest wait for the reply in seconds. None: the client's `timeout_s`.

        Returns:
            The text of the prompt, which ends where the answer begins.

        Raises:
            InvalidRequest: The model has no chat template, or the template refuses the messages.
            LlamaqError: The other errors of `tokenize`.
        """
        return (await text_commands.ask(self.connection, TextAction.APPLY_TEMPLATE, timeout, messages=messages)).text

    async def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the queue's model, for many texts in this process. It needs `llamaq[tokenizer]`.

        `tokenize`, `detokenize` and `apply_template` ask a worker instead, and need no extra.

        Returns:
            The tokenizer. It is downloaded from Redis once per process and model.

        Raises:
            NoWorker: No worker serves the queue.
            MissingExtra: `llamaq[tokenizer]` is not installed.
            ProtocolError: The vocabulary in Redis is damaged.
        """
        return await load_tokenizer(self.redis, self.keys, await self._worker_card())

    async def _worker_card(self) -> WorkerCard:
        workers = await self.workers()
        if not workers:
            raise NoWorker(self.queue)
        return workers[0].card

    async def _card(self, _queue: str) -> WorkerCard:
        return await self._worker_card()
