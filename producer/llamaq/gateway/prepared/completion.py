"""Chat completions and completions: OpenAI's requests that generate text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Self

from llamaq.common.protocol.job_outcome import TokenLogprobs
from llamaq.common.protocol.prompt_logprobs import PromptLogprobs
from llamaq.gateway.completions.function_call import as_function_call
from llamaq.gateway.completions.logprobs import logprobs_object, tokens_of
from llamaq.gateway.completions.prompt_probabilities import (
    PromptFields,
    PromptProbabilities,
    PromptValueCount,
    joined,
)
from llamaq.gateway.completions.token_id_fields import write_token_ids
from llamaq.gateway.infill import with_gap_of_suffix
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.request_tokenization import prompt_tokens_of, with_tokens
from llamaq.gateway.timings import timings_object
from llamaq.gateway.token_bytes_cache import TokenStarts
from llamaq.producer import AsyncClient, Result
from llamaq.producer.answer_parts.answer_format import CONTENT_ALONE, AnswerForm
from llamaq.producer.answer_parts.answer_splitter import AnswerSplitter
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.request_body import GenerationBody, read_body, read_flag
from llamaq.producer.openai_format.response_body import completion_object
from llamaq.producer.openai_format.tools import form_options, message_of

FINGERPRINT = f"build-llamaq-{version('llamaq')}"
"""The `system_fingerprint` of answers. As with llama-server, it begins with a `b`."""


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A request of `/v1/chat/completions` or `/v1/completions`."""

    models: ModelKnowledge
    client: AsyncClient
    """The client of the queue."""
    body: GenerationBody
    form: AnswerForm
    """How the answers are written."""
    echoed: Sequence[str]
    """For each choice, the prompt that its text begins with. Empty: the texts begin with no prompt."""
    jobs: Sequence[dict[str, Any]]
    """The arguments of `submit` for each choice."""
    has_prompt_logprobs: bool = False
    """Whether the answer has the field `prompt_logprobs`."""
    has_token_ids: bool = False
    """Whether the answer has the tokens of prompts and choices."""

    @classmethod
    async def read(
        cls, models: ModelKnowledge, client: AsyncClient, endpoint: Endpoint, fields: Mapping[str, Any]
    ) -> Self:
        """Return what the body of a request asks for.

        Args:
            models: What is known about the models.
            client: The client of the queue.
            endpoint: The endpoint that the body is for.
            fields: The decoded JSON object.

        Raises:
            InvalidRequest: A field is not valid. The message names it.
            LlamaqError: The request needs a worker, and none has replied.
        """
        if endpoint is Endpoint.COMPLETIONS:
            fields = await with_gap_of_suffix(client, fields)
        body = read_body(endpoint, await with_tokens(client, fields))
        echoed = await _read_echoed(client, body)
        form = CONTENT_ALONE
        if endpoint is Endpoint.CHAT:
            may_reason = fields.get("reasoning_format") != "none"
            form = await models.forms.of(
                client.connection, body.jobs[0], is_parallel=body.tool_choice.is_parallel, may_reason=may_reason
            )
        more = form_options(form, body.tool_choice, body.jobs[0])
        return cls(
            models,
            client,
            body,
            form,
            echoed,
            [job | more for job in body.jobs],
            has_prompt_logprobs=fields.get("prompt_logprobs") is not None,
            has_token_ids=read_flag(fields, "return_token_ids"),
        )

    @property
    def model(self) -> str:
        """The name of the model that the answer shows."""
        return self.body.model or self.client.queue

    @property
    def n_choices(self) -> int:
        """Number of choices for each prompt."""
        return self.body.n

    def splitters(self) -> list[AnswerSplitter]:
        """Return a new splitter for each choice. Empty: the choices contain only content."""
        return [self.form.splitter() for _ in self.jobs] if self.form.is_split else []

    async def logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], starts: TokenStarts
    ) -> dict[str, Any]:
        """Return the object `logprobs` of some tokens. `starts` finds where they begin in the text of their choice."""
        pieces = await self.models.token_bytes(self.client, tokens_of(tokens, logprobs))
        return logprobs_object(self.body.endpoint, tokens, logprobs, pieces, starts)

    @property
    def scores_echo(self) -> bool:
        """Whether the echoed prompts have probabilities."""
        return self.body.is_echoed and "logprobs" in self.jobs[0]

    async def fields_of_prompt(self, prompt: PromptLogprobs, echoed: str) -> PromptFields:
        """Return what a choice has about the probabilities of its prompt, whose text in the answer is `echoed`."""
        writer = PromptProbabilities(self.models, self.client)
        logprobs = await writer.echoed(prompt, echoed, self.jobs[0]["logprobs"]) if self.scores_echo else None
        listed = {"prompt_logprobs": await writer.listed(prompt)} if self.has_prompt_logprobs else {}
        return PromptFields(logprobs, listed)

    async def prompts(self) -> list[list[int]]:
        """Return the tokens of the prompt of each choice."""
        asking = [partial(prompt_tokens_of, self.client, job) for job in self.jobs[:: self.body.n]]
        found = [await self.models.reply(self.client, ask) for ask in asking]
        return [found[index // self.body.n] for index in range(len(self.jobs))]

    async def count_reasoning(self, results: Iterable[Result]) -> int:
        """Return how many tokens of the answers are reasoning."""
        return await self.models.count_reasoning(self.form, *results)

    async def answer(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the whole answer.

        Raises:
            InvalidRequest: The prompts have too many probabilities for one answer.
            LlamaqError: No worker of the queue has answered.
        """
        count = PromptValueCount()
        for result in results:
            count.add(result)
        echoed = self.echoed or [""] * len(results)
        prompts = [await self._fields_of_prompt(*each) for each in zip(results, echoed, strict=True)]
        logprobs = [await self._logprobs_of(*each) for each in zip(results, echoed, prompts, strict=True)]
        messages = [
            message_of(splitter.read(result), result.job_id)
            for splitter, result in zip(self.splitters(), results, strict=False)
        ]
        if self.body.has_functions:
            messages = [as_function_call(message) for message in messages]
        answer = completion_object(
            self.body.endpoint,
            *results,
            model=self.model,
            created_s=int(time.time()),
            n=self.body.n,
            echoed=self.echoed,
            logprobs=logprobs,
            messages=messages,
            n_reasoning=await self.count_reasoning(results),
        )
        if self.body.endpoint is Endpoint.CHAT:
            answer |= prompts[0].listed
        else:
            choices = zip(answer["choices"], prompts, strict=True)
            answer["choices"] = [choice | prompt.listed for choice, prompt in choices]
        if self.has_token_ids:
            write_token_ids(self.body.endpoint, answer, await self.prompts(), [result.tokens for result in results])
        return answer | {"system_fingerprint": FINGERPRINT, "timings": timings_object(results[0].stats)}

    async def _fields_of_prompt(self, result: Result, echoed: str) -> PromptFields:
        if result.prompt_logprobs is None:  # the job did not ask for them, or ended before it had them
            return PromptFields()
        return await self.fields_of_prompt(result.prompt_logprobs, echoed)

    async def _logprobs_of(self, result: Result, echoed: str, prompt: PromptFields) -> dict[str, Any] | None:
        """Return the object `logprobs` of a choice. None: its job has none."""
        generated = None
        if result.logprobs is not None:
            generated = await self.logprobs(result.tokens, result.logprobs, TokenStarts(len(echoed)))
        return generated if prompt.logprobs is None else joined(prompt.logprobs, generated)


async def _read_echoed(client: AsyncClient, body: GenerationBody) -> list[str]:
    """Return the prompts as texts, if the answer begins with them."""
    if not body.is_echoed:
        return []
    return [job["prompt"] if "prompt" in job else await client.detokenize(job["tokens"]) for job in body.jobs]
