"""The bodies of requests, for the description of the API. The endpoints themselves read bodies field by field."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from llamaq.gateway.batches.record import BatchEndpoint

MODEL = Field(None, description="Name of the queue, or of the model that its workers serve.")
STREAM = Field(False, description="Send the answer as server-sent events.")
RETURN_PROGRESS = Field(
    False, description="While the prompt is computed, a stream has chunks with `prompt_progress`, as in llama-server."
)
TIMINGS_PER_TOKEN = Field(False, description="Each chunk of a stream has the `timings` so far, as in llama-server.")


class Body(BaseModel):
    """A body. Unknown fields are ignored."""

    model_config = ConfigDict(extra="allow")


class ErrorFields(BaseModel):
    """Why a request was refused."""

    message: str = Field(description="The error in words.")
    type: str = Field(description="Kind of the error, which belongs to the status.")
    code: str | None = Field(description="Kind of the error, for programs.")
    param: str | None = Field(description="The field that is wrong.")


class ErrorBody(BaseModel):
    """The body of a response with a status from 400 on."""

    error: ErrorFields


class MessageErrorFields(BaseModel):
    """Why a request of Anthropic's API was refused."""

    type: str = Field(description="Kind of the error, which belongs to the status.")
    message: str = Field(description="The error in words.")


class MessageErrorBody(BaseModel):
    """The body of a response of Anthropic's API with a status from 400 on."""

    type: Literal["error"]
    error: MessageErrorFields


class ChatRequest(Body):
    """A request for the answer to a chat. It may also have the options of a job."""

    messages: list[dict[str, JsonValue]] = Field(description="The chat: objects with `role` and `content`.")
    model: str | None = MODEL
    stream: bool = STREAM
    stream_options: dict[str, JsonValue] | None = Field(
        None,
        description="`include_usage`: a last chunk with the usage. `continuous_usage_stats` too: the usage so far in "
        "each chunk.",
    )
    return_token_ids: bool = Field(False, description="Return the token ids of the prompt and of the answer too.")
    return_progress: bool = RETURN_PROGRESS
    timings_per_token: bool = TIMINGS_PER_TOKEN
    n: int = Field(1, ge=1, le=128, description="Number of answers.")
    max_completion_tokens: int | None = Field(None, description="Largest number of generated tokens.")
    response_format: dict[str, JsonValue] | None = Field(
        None, description="`type`: `text`, `json_object` or `json_schema`."
    )
    structured_outputs: dict[str, JsonValue] | None = Field(
        None, description="vLLM's constraints: one of `json`, `grammar`, `regex` and `choice`."
    )
    store: bool = Field(False, description="Let a stream's job run to its end after the client has disconnected.")


class PromptObject(Body):
    """A prompt in a form of llama-server."""

    prompt_string: str = Field(description="The prompt as text.")
    multimodal_data: list[JsonValue] = Field([], max_length=0, description="Images: not supported.")


Prompt = str | PromptObject | list[int | str]


class CompletionRequest(ChatRequest):
    """A request to continue texts. It may also have the options of a job."""

    messages: None = None  # type: ignore[assignment]  # a completion has a prompt instead
    prompt: Prompt | list[Prompt] = Field(description="One prompt or several: text or token ids, also mixed.")
    suffix: str | None = Field(
        None, description="The text after a gap that the model fills. `prompt` is one text then."
    )
    echo: bool = Field(False, description="Begin the answer with the prompt.")


class NativeRequest(CompletionRequest):
    """A request to continue texts, in the form of llama-server. It may also have the options of a job."""

    n_predict: int | None = Field(None, description="Largest number of generated tokens. -1: no limit.")
    n_probs: int | None = Field(None, ge=0, le=20, description="Number of alternatives for each token.")
    return_tokens: bool = Field(False, description="Return the token ids too.")
    response_fields: list[str] | None = Field(
        None, description="The only fields of the answer, such as `content` or `generation_settings/n_predict`."
    )


class InfillSnippet(BaseModel):
    """A text that the model reads before the text with the gap."""

    text: str = Field(description="The text.")
    filename: str = Field("tmp", description="Name of the file.")


class InfillRequest(NativeRequest):
    """A request of llama-server to fill the gap of a text. It may also have the options of a job."""

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after the gap.")
    input_extra: list[InfillSnippet] | None = Field(None, description="Other texts that the model reads before.")
    prompt: str = Field("", description="The beginning of what belongs into the gap.")


class MessagesRequest(Body):
    """A request of Anthropic's API. It may also have the options of a job."""

    model: str = Field(description="Name of the queue, or of the model that its workers serve.")
    messages: list[dict[str, JsonValue]] = Field(description="The chat: objects with `role` and `content`.")
    max_tokens: int | None = Field(None, description="Largest number of generated tokens.")
    system: str | list[dict[str, JsonValue]] | None = Field(None, description="The system prompt.")
    stop_sequences: list[str] | None = Field(None, description="Strings that end the answer.")
    tools: list[dict[str, JsonValue]] | None = Field(
        None, description="Tools that the model may use: objects with `name`, `description` and `input_schema`."
    )
    tool_choice: dict[str, JsonValue] | None = Field(
        None, description="`type`: `auto`, `any`, `none`, or `tool` with a `name`; `disable_parallel_tool_use`."
    )
    thinking: dict[str, JsonValue] | None = Field(
        None,
        description="`type`: `enabled` or `adaptive` let the model reason, `disabled` does not. `budget_tokens`: the "
        "largest number of tokens of reasoning.",
    )
    output_config: dict[str, JsonValue] | None = Field(
        None, description="`format`: a JSON schema of the answer; `effort`: of the reasoning, for the chat template."
    )
    metadata: dict[str, JsonValue] | None = Field(None, description="`user_id`: the tenant of the job.")
    stream: bool = STREAM


class ResponseRequest(Body):
    """A request of the Responses API. It may also have the options of a job."""

    input: str | list[dict[str, JsonValue]] = Field(
        description="A text, or items of the types message, reasoning, function_call and function_call_output."
    )
    model: str | None = MODEL
    instructions: str | None = Field(None, description="The system prompt of this request alone.")
    previous_response_id: str | None = Field(None, description="The response that the conversation continues.")
    max_output_tokens: int | None = Field(None, description="Largest number of generated tokens.")
    text: dict[str, JsonValue] | None = Field(None, description="`format`: how the output is constrained.")
    tools: list[dict[str, JsonValue]] | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | dict[str, JsonValue] | None = Field(
        None, description="`auto`, `none`, `required`, a function, or `allowed_tools`."
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether an answer may have several calls.")
    reasoning: dict[str, JsonValue] | None = Field(
        None,
        description="`effort`: of the reasoning, for the chat template. `none`: no reasoning. `summary`: the "
        "reasoning has the form of a summary too.",
    )
    include: list[str] | None = Field(None, description="`message.output_text.logprobs`: probabilities of the tokens.")
    top_logprobs: int | None = Field(None, description="Number of alternatives for each token.")
    truncation: str | None = Field(
        None,
        description="`auto`: leave out the oldest turns of a conversation that is too long.",
    )
    background: bool = Field(False, description="Return the response before it has ended.")
    store: bool = Field(True, description="Store the response.")
    stream: bool = STREAM
    return_progress: bool = RETURN_PROGRESS
    timings_per_token: bool = TIMINGS_PER_TOKEN


class EmbeddingRequest(Body):
    """Texts to embed: `input`, or llama-server's `content`."""

    input: str | list[int] | list[str] | list[list[int]] = Field(description="One text or several: text or token ids.")
    model: str | None = MODEL
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="`base64`: 32-bit floating-point numbers, little-endian."
    )
    dimensions: int | None = Field(None, ge=1, description="Number of values of each embedding that are returned.")
    embd_normalize: Literal[-1, 0, 1, 2] = Field(
        2,
        description="2: to the Euclidean length 1. 1: to the sum 1 of absolute values. 0: to the range of 16 bits. "
        "-1: not at all.",
    )


class RerankRequest(Body):
    """Documents to sort by how well they answer a query."""

    query: str = Field(description="The query.")
    documents: list[str | dict[str, JsonValue]] | None = Field(None, description="Texts, or objects with a `text`.")
    texts: list[str] | None = Field(None, description="In place of `documents`, for an answer in the form of TEI.")
    model: str | None = MODEL
    top_n: int | None = Field(None, ge=1, description="Largest number of documents in the answer.")
    return_documents: bool = Field(False, description="Return the documents too.")
    return_text: bool = Field(False, description="Return the `texts` too.")


class FileUpload(Body):
    """A file of requests, as a form."""

    file: str = Field(description="The file: one request in each line.", json_schema_extra={"format": "binary"})
    purpose: Literal["batch"] = Field(description="What the file is for.")


class NewBatch(Body):
    """A request to compute the lines of a file."""

    input_file_id: str = Field(description="The file, uploaded before.")
    endpoint: BatchEndpoint = Field(description="The endpoint that all lines are for.")
    completion_window: str = Field("24h", description="Longest duration: a number and `m`, `h` or `d`.")
    metadata: dict[str, str] | None = Field(None, description="Texts that the batch shows again.")
    output_expires_after: dict[str, JsonValue] | None = Field(
        None, description="`anchor` `created_at` and `seconds`: how long the output is stored."
    )


class TokenizeRequest(Body):
    """A text to tokenize: `content`, `prompt` or `messages`."""

    content: str | None = Field(None, description="A text.")
    add_special: bool = Field(False, description="Add BOS if the model asks for it.")
    parse_special: bool = Field(
        True, description="Turn the texts of special tokens in `content` into these tokens. False: they stay text."
    )
    with_pieces: bool = Field(False, description="Return the text of each token.")
    model: str | None = MODEL


class DetokenizeRequest(Body):
    """Token ids."""

    tokens: list[int] = Field(description="Token ids of the model.")
    model: str | None = MODEL


BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/chat/completions": ChatRequest,
    "/v1/chat/completions/input_tokens": ChatRequest,
    "/chat/completions/input_tokens": ChatRequest,
    "/apply-template": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/completion": NativeRequest,
    "/completions": NativeRequest,
    "/infill": InfillRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": MessagesRequest,
    "/v1/responses": ResponseRequest,
    "/responses": ResponseRequest,
    "/v1/responses/input_tokens": ResponseRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/embeddings": EmbeddingRequest,
    "/embedding": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/v1/reranking": RerankRequest,
    "/rerank": RerankRequest,
    "/reranking": RerankRequest,
    "/v1/files": FileUpload,
    "/v1/batches": NewBatch,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""Maps the path of an endpoint to the model of its body."""
FORMS = frozenset({"/v1/files"})
"""Endpoints whose body is a form."""
WITH_JOB_OPTIONS = (ChatRequest, CompletionRequest, InfillRequest, MessagesRequest, NativeRequest, ResponseRequest)
