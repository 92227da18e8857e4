"""Requests for embeddings and rankings, and their answers, in the forms of OpenAI, llama-server, Jina and TEI."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from pydantic_core import to_json

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.embedding_task import MAX_DIMENSIONS, Embedding, Normalization
from llamaq.common.protocol.job_request import EMBEDDING_OPTIONS
from llamaq.common.protocol.sampling import MAX_TOKEN_ID
from llamaq.producer.embed_and_rerank import RankedDocument
from llamaq.producer.openai_format.request_body import read_options, refuse_unsupported, with_integers

MAX_INPUTS = 2048
"""Largest number of texts in one request, as in OpenAI's API."""
NORMALIZATIONS = {
    -1: Normalization.NONE,
    0: Normalization.MAX_ABSOLUTE,
    1: Normalization.TAXICAB,
    2: Normalization.EUCLIDEAN,
}
"""The values of llama-server's `embd_normalize`."""
REFUSED_IF_FALSE = {
    "add_special_tokens": "llamaq always adds the special tokens of the model to a text; leave it out",
    "normalize": "llamaq does not support false; at the endpoints for embeddings, `embd_normalize` -1 has this meaning",
}
"""Fields of vLLM that are true if a request does not have them, and why llamaq refuses false."""
OPTION_FIELDS = EMBEDDING_OPTIONS - {"seed", "cache_salt"} | {"user", "service_tier"}
"""Fields of a request that become options of its jobs. A seed and a salt would have no effect."""


@dataclass(frozen=True, slots=True)
class EmbeddingBody:
    """What a request for embeddings asks for."""

    inputs: Any
    """The inputs as the request has them; lists may mix texts and tokens."""
    is_native: bool
    """Whether the request has llama-server's field `content`. Then the answer has the form of llama-server."""
    dimensions: int | None
    normalization: Normalization | None
    is_base64: bool
    options: dict[str, Any]
    """The job options: how the jobs are scheduled, and their tenant."""


def read_embedding_body(body: Mapping[str, Any]) -> EmbeddingBody:
    """Return what a request for embeddings asks for.

    Raises:
        InvalidRequest: A field is wrong. The message names it.
    """
    options = _read_options(body)
    body = with_integers(body)
    name = "input" if "input" in body else "content"
    if name not in body:
        raise InvalidRequest("input: a text, token ids, or a list of these is required")
    encoding = body.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise InvalidRequest("encoding_format: float or base64 is required")
    dimensions = body.get("dimensions")
    if dimensions is not None and (not _is_int(dimensions) or not 1 <= dimensions <= MAX_DIMENSIONS):
        raise InvalidRequest(f"dimensions: a number from 1 to {MAX_DIMENSIONS} is required")
    how = body.get("embd_normalize", 2)
    if not _is_int(how) or how not in NORMALIZATIONS:
        raise InvalidRequest("embd_normalize: -1, 0, 1 or 2 is required")
    inputs = _listed(body[name], name)
    return EmbeddingBody(inputs, name == "content", dimensions, NORMALIZATIONS[how], encoding == "base64", options)


def _read_options(body: Mapping[str, Any], *, except_for: str | None = None) -> dict[str, Any]:
    """Return the job options of a request.

    Args:
        body: The body of the request.
        except_for: A field that the endpoint of the request supports, unlike those that generate text.

    Raises:
        InvalidRequest: A field is wrong, or would change the answer and is not supported.
    """
    refuse_unsupported(body, except_for=except_for)
    for name, reason in REFUSED_IF_FALSE.items():
        if body.get(name) is False:
            raise InvalidRequest(f"{name}: {reason}")
    return read_options({name: value for name, value in with_integers(body).items() if name in OPTION_FIELDS})


def _listed(value: Any, name: str) -> list[Any]:
    """Return the inputs of a request as a list. A list that contains a token id is a single input."""
    if not isinstance(value, list) or any(_is_int(each) for each in value):
        return [_input(value, name)]
    if not 1 <= len(value) <= MAX_INPUTS:
        raise InvalidRequest(f"{name}: 1 to {MAX_INPUTS} texts are required")
    return [_input(each, f"{name}.{index}") for index, each in enumerate(value)]


def _input(value: Any, place: str) -> Any:
    """Return one input. A list of content parts becomes a text."""
    if isinstance(value, Mapping) and "content" in value:
        return _joined(value["content"], f"{place}.content")
    if isinstance(value, Mapping) and isinstance(value.get("prompt_string"), str) and "multimodal_data" not in value:
        return value["prompt_string"]
    if isinstance(value, str) or (isinstance(value, list) and value and all(map(_is_text_or_token, value))):
        return value
    raise InvalidRequest(f"{place}: a text or a list of token ids is required")


def _joined(parts: Any, place: str) -> str:
    """Return the text of content parts."""
    if not isinstance(parts, list) or not parts or not all(map(_is_text_part, parts)):
        raise InvalidRequest(f"{place}: parts of the form {{'type': 'text', 'text': …}} are required")
    return "".join(part["text"] for part in parts)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_text_or_token(value: Any) -> bool:
    return isinstance(value, str) or (_is_int(value) and 0 <= value <= MAX_TOKEN_ID)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def encode_embeddings(embeddings: Sequence[Embedding], model: str, *, is_base64: bool) -> bytes:
    """Return the answer of OpenAI's API as JSON. It is encoded in steps, between which other threads run.

    Raises:
        ValueError: An embedding has a number that JSON does not have, such as NaN.
    """
    encode = _encode_base64 if is_base64 else _encode_vector
    parts = [b'{"object":"list","model":', to_json(model), b',"data":[']
    for index, each in enumerate(embeddings):
        start = b'{"object":"embedding","index":%d,"embedding":' % index
        parts += [b"," if index else b"", start, encode(each.data), b"}"]
    return b"".join([*parts, b'],"usage":', to_json(embedding_usage(embeddings)), b"}"])


def encode_native_embeddings(embeddings: Sequence[Embedding]) -> bytes:
    """Return the answer of llama-server's own endpoint as JSON: a list of vectors for each input.

    It is encoded in steps, as in `encode_embeddings`. An input may have thousands of vectors.

    Raises:
        ValueError: As in `encode_embeddings`.
    """
    parts = []
    for index, each in enumerate(embeddings):
        parts.append(b'%b{"index":%d,"embedding":[' % (b"," if index else b"", index))
        for number, row in enumerate(_rows_of(each)):
            parts += [b"," if number else b"", _encode_vector(row)]
        parts.append(b"]}")
    return b"".join([b"[", *parts, b"]"])


def _rows_of(embedding: Embedding) -> Iterator[bytes]:
    """Yield the bytes of each vector."""
    size = len(embedding.data) // embedding.n_rows
    for start in range(0, len(embedding.data), size):
        yield embedding.data[start : start + size]


def _encode_vector(row: bytes) -> bytes:
    vector = Embedding(0, 1, row).vector
    if not isfinite(sum(vector)):
        raise ValueError("an embedding has a number that JSON does not have")
    return to_json(vector)


def _encode_base64(row: bytes) -> bytes:
    return b'"' + base64.b64encode(row) + b'"'


def embedding_usage(embeddings: Sequence[Embedding]) -> dict[str, int]:
    """Return the object `usage` of an answer with embeddings."""
    return _usage(each.n_tokens for each in embeddings)


def _usage(numbers: Any) -> dict[str, int]:
    total = sum(numbers)
    return {"prompt_tokens": total, "total_tokens": total}


@dataclass(frozen=True, slots=True)
class RankingBody:
    """What a request for a ranking asks for."""

    query: str
    documents: Sequence[str]
    is_tei: bool
    """Whether the request has the form of Text Embeddings Inference."""
    top_n: int | None
    returns_text: bool
    options: dict[str, Any]
    """The job options, as in `EmbeddingBody`."""


def read_ranking_body(body: Mapping[str, Any]) -> RankingBody:
    """Return what a request for a ranking asks for.

    Raises:
        InvalidRequest: A field is wrong. The message names it.
    """
    options = _read_options(body, except_for="documents")
    body = with_integers(body)
    query = body.get("query")
    if not isinstance(query, str):
        raise InvalidRequest("query: a text is required")
    is_tei = "texts" in body
    name = "texts" if is_tei else "documents"
    given = body.get(name)
    documents = [_document(each) for each in given] if isinstance(given, list) else []
    if not 1 <= len(documents) <= MAX_INPUTS or None in documents:
        raise InvalidRequest(f"{name}: a list of 1 to {MAX_INPUTS} texts is required")
    top_n = body.get("top_n")
    if top_n is not None and (not _is_int(top_n) or top_n < 1):
        raise InvalidRequest("top_n: a number of at least 1 is required")
    returns_text = bool(body.get("return_text" if is_tei else "return_documents"))
    return RankingBody(query, [each for each in documents if each is not None], is_tei, top_n, returns_text, options)


def _document(value: Any) -> str | None:
    """Return the text of a document. Dify sends lists of content parts, which vLLM accepts too."""
    match value:
        case str(text) | {"text": str(text)}:
            return text
        case {"content": content}:
            return _joined(content, "documents.content")
    return None


def ranking_object(
    ranking: Sequence[RankedDocument], body: RankingBody, model: str, n_tokens: int
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the answer to a request for a ranking, the best document first."""
    results = [_ranked(one, body) for one in ranking]
    if body.is_tei:
        return results
    return {"object": "list", "model": model, "results": results, "usage": _usage([n_tokens])}


def _ranked(one: RankedDocument, body: RankingBody) -> dict[str, Any]:
    text = {"text": body.documents[one.index]} if body.returns_text else {}
    if body.is_tei:
        return {"index": one.index, "score": one.score, **text}
    return {"index": one.index, "relevance_score": one.score} | ({"document": text} if text else {})
