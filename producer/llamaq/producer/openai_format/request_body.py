"""Reads the prompts and the job options from the body of a request of the OpenAI API.

The names of llama-server and vLLM for the same options are accepted too.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_request import TENANT_PATTERN, JobRequest, Priority
from llamaq.common.protocol.output_params import BAN, MAX_SEED
from llamaq.common.protocol.sampler_names import LETTERS
from llamaq.producer.openai_format.chat_messages import TEMPLATE_FIELDS, read_chat
from llamaq.producer.openai_format.endpoints import Endpoint
from llamaq.producer.openai_format.logprobs import read_logprobs
from llamaq.producer.openai_format.output_format import read_constraint
from llamaq.producer.openai_format.tools import ToolChoice, read_tools, with_tools_of_functions
from llamaq.producer.option_synonyms import SYNONYMS
from llamaq.producer.submission import SEED_BITS

MAX_CHOICES = 128
"""Largest number of answers to one request: `n` times the number of prompts."""
RETIRED_SAMPLERS = ("tfs_z", "tfs", "tail_free")
"""Names of tail-free sampling, which llama.cpp had until 2024. Stored settings still name it, for example
SillyTavern's default preset. llama-server leaves it out."""
RESERVED = frozenset(
    {
        "cancel_on_disconnect", "grammar", "has_random_seed", "idempotency_key", "json_schema", "logit_bias",
        "logprobs", "lora", "messages", "priority", "prompt", "prompt_progress", "return_progress", "stream", "tokens",
    }
)  # fmt: skip
"""Fields of a job that are not copied from the body: the caller sets them, or separate functions read them."""

PROGRESS_FIELDS = ("prompt_progress", "return_progress", "timings_per_token")
"""Fields for which the job of a stream publishes the progress of its prompt."""

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "image_data": ([],),
    "prompt_logprobs": (0,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields that change the answer and that llamaq does not support. Each has the values that change nothing."""


@dataclass(frozen=True, slots=True)
class GenerationBody:
    """What a body of `/v1/chat/completions` or `/v1/completions` asks for."""

    endpoint: Endpoint
    model: str | None
    """The name of the model in the body. None: the body names none."""
    jobs: tuple[dict[str, Any], ...]
    """For each choice of the answer, the arguments of `submit`: a prompt, and job options."""
    n: int = 1
    """Number of choices for each prompt. The choices of one prompt follow each other in `jobs`."""
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    """The tools that the answers may call."""
    has_functions: bool = False
    """Whether the body names these tools as `functions`. Then the answers call them in this older form too."""
    is_streamed: bool = False
    """Whether the answer is a stream of chunks."""
    has_usage_chunk: bool = False
    """Whether the stream ends with a chunk that has the usage."""
    is_stored: bool = False
    """Whether the jobs of a stream run to their end after the client has disconnected."""
    is_echoed: bool = False
    """Whether the text of a completion begins with its prompt."""

    @property
    def only_job(self) -> dict[str, Any]:
        """The arguments of `submit` for the only choice.

        Raises:
            InvalidRequest: The body asks for several choices, for calls of tools, or for probabilities, whose texts
                only a worker knows.
        """
        if self.tool_choice.tools:
            raise InvalidRequest("tools: not supported here; leave it out")
        for name in {"logprobs", "prompt_logprobs"} & self.jobs[0].keys():
            raise InvalidRequest(f"{name}: not supported here; leave it out")
        if len(self.jobs) != 1:
            raise InvalidRequest("n: a request with several answers, or several prompts, is not supported here")
        return self.jobs[0]


def read_body(endpoint: Endpoint, body: Mapping[str, Any]) -> GenerationBody:
    """Return what the body of a request asks for. Fields that llamaq does not know are ignored.

    Args:
        endpoint: The endpoint that the body is for.
        body: The decoded JSON object.

    Raises:
        InvalidRequest: The body has no prompt, or a field that is not supported. The message names the field.
    """
    has_functions = endpoint is Endpoint.CHAT and bool(body.get("functions"))
    if has_functions:
        body = with_tools_of_functions(body)
    refuse_unsupported(body, except_for="prompt_logprobs")
    body = with_integers(body)
    prompts = [read_chat(body)] if endpoint is Endpoint.CHAT else _read_prompts(body.get("prompt"))
    options = read_options(body) | read_logprobs(endpoint, body)
    is_echoed = endpoint is Endpoint.COMPLETIONS and read_flag(body, "echo")
    if is_echoed and "logprobs" in options:  # the echoed prompt has probabilities too
        options.setdefault("prompt_logprobs", options["logprobs"])
    n = _read_count(body.get("n"))
    if n * len(prompts) > MAX_CHOICES:
        raise InvalidRequest(f"n: {n * len(prompts)} answers are more than {MAX_CHOICES}")
    return GenerationBody(
        endpoint,
        read_model(body),
        tuple(_with_seed({**prompt, **options}, number) for prompt in prompts for number in range(n)),
        n=n,
        tool_choice=read_tools(body) if endpoint is Endpoint.CHAT else ToolChoice(),
        has_functions=has_functions,
        is_streamed=read_flag(body, "stream"),
        has_usage_chunk=_read_stream_flag(body, "include_usage"),
        is_stored=read_flag(body, "store"),
        is_echoed=is_echoed,
    )


def with_integers(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body in which numbers such as 1.0 are integers, as JSON Schema defines them."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in body.items()
    }


def read_model(body: Mapping[str, Any]) -> str | None:
    """Return the name of the model in a body. None: the body names none."""
    model = body.get("model")
    return model if isinstance(model, str) and model else None


def refuse_unsupported(body: Mapping[str, Any], *, except_for: str | None = None) -> None:
    """Refuse fields that change the answer and that llamaq does not support.

    Args:
        body: The body of a request.
        except_for: A field that the endpoint of the request supports, unlike others.

    Raises:
        InvalidRequest: The body has such a field. The message names it.
    """
    for name, harmless in UNSUPPORTED.items():
        value = body.get(name)
        if name == except_for:
            continue
        if name == "best_of" and value == body.get("n"):  # all answers are returned, so there is no choice to make
            continue
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{name}: llamaq does not support it; leave it out")


def read_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job options of a body, without those of its prompt.

    Raises:
        InvalidRequest: A field has a form that is not supported. The message names it.
    """
    known = (JobRequest.model_fields.keys() | SYNONYMS.keys()) - RESERVED - TEMPLATE_FIELDS
    options = {name: value for name, value in body.items() if name in known and value is not None}
    check_length(body, "max_completion_tokens")
    options |= read_constraint(body) | _read_logit_bias(body.get("logit_bias")) | _read_lora(body.get("lora"))
    _translate_values(options)
    limit_ms = body.get("t_max_predict_ms")
    if limit_ms is not None and (isinstance(limit_ms, bool) or not isinstance(limit_ms, int | float)):
        raise InvalidRequest(f"t_max_predict_ms: a number is required, not {str(limit_ms)[:50]!r}")
    if limit_ms is not None and limit_ms > 0:  # 0 and -1 are llama-server's names for no limit
        options.setdefault("generation_timeout_s", _seconds_of("t_max_predict_ms", limit_ms))
    user = body.get("user")
    if isinstance(user, str) and user and "tenant" not in options:
        options["tenant"] = _tenant_of(user)
    if _is_bulk(body):
        options["priority"] = Priority.BULK
    asks_for_progress = [read_flag(body, name) for name in PROGRESS_FIELDS]
    if any([*asks_for_progress, has_usage_in_chunks(body)]) and read_flag(body, "stream"):
        options["prompt_progress"] = True
    return options


def check_length(body: Mapping[str, Any], name: str) -> None:
    """Refuse a boolean or a number below 1 as the length of the answer, under the name that the request has for it.

    Raises:
        InvalidRequest: The length is a boolean, or below 1.
    """
    value = body.get(name)
    if isinstance(value, bool) or (value != -1 and _is_below(value, 1)):  # -1 is llama-server's name for no limit
        raise InvalidRequest(f"{name}: a number of at least 1 is required, not {str(value)[:50]}")


def _translate_values(options: dict[str, Any]) -> None:
    """Replace values that other servers accept by values with the same meaning here."""
    for name in ("top_p", "typical_p", "typ_p"):
        if options.get(name) == 0 and options[name] is not False:  # OpenAI's API allows 0: the smallest set is kept
            options[name] = 1e-9
    if _is_below(options.get("top_k"), 0):  # vLLM and llama-server: all tokens
        options["top_k"] = 0
    seed = options.get("seed")
    if seed == 2**32 - 1:  # llama-server: a random seed
        del options["seed"]
    elif type(seed) is int and seed < -1:  # OpenAI's API has seeds of 64 bits with a sign
        options["seed"] = seed & MAX_SEED
    if isinstance(options.get("mirostat"), bool):  # promptfoo's options for llama-server have a switch
        options["mirostat"] = int(options["mirostat"])
    if _is_below(options.get("dry_base"), 1):  # llama-server takes its default
        del options["dry_base"]
    if "stop" in options and not options["stop"]:
        del options["stop"]
    if "samplers" in options:
        options["samplers"] = _read_samplers(options["samplers"])


def _read_samplers(value: Any) -> Any:
    """Return the samplers without retired ones. A text of letters is no name, not even `temp`, as in llama-server."""
    if isinstance(value, str) and set(value) <= LETTERS.keys():
        return [LETTERS[letter] for letter in value]
    return [name for name in value if name not in RETIRED_SAMPLERS] if isinstance(value, list) else value


def _is_below(value: Any, bound: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value < bound


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a boolean of the body, which is false if it is missing.

    Raises:
        InvalidRequest: It is something else.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name}: true or false is required, not {str(value)[:50]!r}")
    return bool(value)


def has_usage_in_chunks(body: Mapping[str, Any]) -> bool:
    """Return whether each chunk of a stream has the usage so far: vLLM's `stream_options.continuous_usage_stats`.

    Raises:
        InvalidRequest: A field is not a boolean.
    """
    is_continuous = _read_stream_flag(body, "continuous_usage_stats")
    return _read_stream_flag(body, "include_usage") and is_continuous


def _read_stream_flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a boolean of `stream_options`, which is false if it is missing. Raises `InvalidRequest`."""
    options = read_fields(body, "stream_options")
    try:
        return read_flag(options, name)
    except InvalidRequest as exc:
        raise InvalidRequest(f"stream_options.{exc}") from exc


def read_fields(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of the body, which is empty if it is missing.

    Raises:
        InvalidRequest: It is something else.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidRequest(f"{name}: an object is required")
    return value or {}


def _read_count(value: Any) -> int:
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequest(f"n: a number from 1 to {MAX_CHOICES} is required, not {str(value)[:50]!r}")
    return value


def _with_seed(values: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the arguments with a seed of this choice: equal seeds, such as a worker's default, give equal choices."""
    seed = values.get("seed")
    if number == 0 or (seed not in (None, -1) and type(seed) is not int):
        return values
    return {**values, "seed": secrets.randbits(SEED_BITS) if seed in (None, -1) else (seed + number) & MAX_SEED}


def _tenant_of(user: str) -> str:
    """Return the tenant of a user. A user may have any name, but the name of a tenant has a simple form.

    Raises:
        InvalidRequest: The name is not valid Unicode.
    """
    try:
        return user if re.fullmatch(TENANT_PATTERN, user) else hashlib.sha256(user.encode()).hexdigest()
    except UnicodeEncodeError as exc:
        raise InvalidRequest("user: the text is not valid Unicode") from exc


def _seconds_of(name: str, milliseconds: float) -> float:
    try:
        return milliseconds / 1000
    except OverflowError as exc:
        raise InvalidRequest(f"{name}: the number is too large") from exc


def _is_bulk(body: Mapping[str, Any]) -> bool:
    """Return whether the request may wait: OpenAI's service tier `flex`, our own `bulk`, or a late priority of vLLM."""
    priority = body.get("priority")
    if isinstance(priority, str) and priority not in set(Priority):
        raise InvalidRequest(f"priority: a number, 'interactive' or 'bulk' is required, not {priority[:50]!r}")
    is_late = isinstance(priority, int | float) and not isinstance(priority, bool) and priority > 0
    return is_late or priority == Priority.BULK or body.get("service_tier") == "flex"


def _read_prompts(prompt: Any) -> list[dict[str, Any]]:
    """Return the prompts of a completion, each as an argument of `submit`."""
    if _is_prompt(prompt):
        return [_prompt_argument(prompt)]
    if isinstance(prompt, list) and prompt and all(_is_prompt(each) for each in prompt):
        return [_prompt_argument(each) for each in prompt]
    raise InvalidRequest("prompt: a text, a list of token ids, or a list of these is required")


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(type(token) is int for token in value)
    )


def _prompt_argument(value: str | list[int]) -> dict[str, Any]:
    return {"prompt": value} if isinstance(value, str) else {"tokens": value}


def _read_logit_bias(value: Any) -> dict[str, Any]:
    """Return the option `logit_bias`: OpenAI's map by token id, or llama-server's list of pairs."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        pairs = [(pair[0], pair[1]) for pair in value]
    elif value is None:
        pairs = []
    else:
        raise InvalidRequest("logit_bias: a map from token ids to numbers is required")
    if not pairs:
        return {}
    if not all(type(token) is int or (isinstance(token, str) and token.isdecimal()) for token, _ in pairs):
        raise InvalidRequest("logit_bias: only token ids are supported, no texts: POST /tokenize returns the ids")
    return {"logit_bias": {token: BAN if bias is False else bias for token, bias in pairs}}


def _read_lora(value: Any) -> dict[str, Any]:
    """Return the option `lora`: llama-server's list of adapters, or our map from names to scales. Empty: no option."""
    if isinstance(value, list) and all(isinstance(each, Mapping) and {"id", "scale"} <= each.keys() for each in value):
        value = {str(each["id"]): each["scale"] for each in value}
    if value is not None and not isinstance(value, Mapping):
        raise InvalidRequest('lora: a list of adapters is required, such as [{"id": 0, "scale": 0.5}]')
    return {"lora": value} if value else {}
