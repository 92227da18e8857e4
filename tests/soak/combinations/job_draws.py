"""Draws jobs: their prompts share prefixes with each other and with earlier outputs, and they combine many options."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from llamaq.common.protocol.job_request import JobRequest

Options = dict[str, Any]

N_PLAIN_TOKENS = 500
"""The tokens below this id are ordinary tokens of a random-weight model."""
N_RECENT = 12
"""Prompts continue one of this number of the last conversations."""
SCHEMAS: tuple[Options, ...] = (
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    {"enum": ["a long constant text that is forced", "another"]},
)
CONSTRAINTS: dict[str, tuple[Any, ...]] = {
    "json_schema": SCHEMAS,
    "grammar": ('root ::= "yes " root | "no"', 'root ::= [a-z]+ "."', 'root ::= ("the " | "and ") root | "end"'),
    "regex": ("[a-f]{3,20}", r"(the|and| of)+\.", "abcabcabcabc[0-9]{2,5}"),
    "choice": (("alpha beta gamma", "alpha beta delta", "no"),),
    "lark": ('start: "item" N\nN: /[0-9]{1,3}/', 'start: (WORD " ")* "done"\nWORD: /[a-z]{1,5}/'),
}
STOPS = (" the", "a", "e ", "\n", "ba", "and", "of", ".", "1", "the end of it")
OPENINGS = ("Once upon a time", "the of and the of and the", "Hello")


class JobDraws:
    """Draws the requests of a round.

    Args:
        rng: Makes the choices.
        n_ctx: Number of KV cells of the workers.
        n_vocab: Number of tokens of the vocabulary.
        n_adapters: Number of LoRA adapters of the workers. Some jobs set their scales.
        has_grammars: Whether some jobs have a grammar. The first one starts the process that compiles grammars.
    """

    def __init__(self, rng: random.Random, n_ctx: int, n_vocab: int, *, n_adapters: int, has_grammars: bool) -> None:
        self._rng, self._n_ctx, self._n_vocab, self._has_grammars = rng, n_ctx, n_vocab, has_grammars
        self._scales: list[dict[str, float]] = [{}, *({str(number): 1.0} for number in range(n_adapters))]
        """Values of the option `lora`."""
        self._openings = [self._random_tokens(rng.choice([3, 10, 33, 64, n_ctx // 3])) for _ in range(4)]
        self.histories: list[list[int]] = []
        """The tokens of the jobs that have ended, prompt and output. Later prompts continue them."""

    def draw(self, twin_of: JobRequest | None = None) -> JobRequest:
        """Return a request, with the prompt of `twin_of` if it is given."""
        if twin_of is None:
            prompt = self._prompt()
        else:
            prompt = twin_of.model_dump(include={"prompt", "tokens", "messages"}, exclude_none=True)
        return JobRequest(**prompt, **self._sampling(), **self._ends(), **self._sharing(), **self._queueing())

    # ---- prompts

    def _prompt(self) -> Options:
        rng, what = self._rng, self._rng.random()
        if what < 0.08:
            return {"prompt": rng.choice(OPENINGS)}
        if what < 0.16:
            return {"messages": self._chat()}
        if what < 0.2:
            return {"tokens": self._random_tokens(self._n_ctx + rng.choice([-10, -2, -1, 0, 5]))}
        if what < 0.5 and self.histories:
            return {"tokens": self._continued(rng.choice(self.histories[-N_RECENT:]))}
        opening = rng.choice(self._openings)
        n_kept = rng.choice([len(opening), len(opening), rng.randint(1, len(opening))])
        return {"tokens": opening[:n_kept] + self._random_tokens(rng.choice([0, 1, 2, 10, 20]))}

    def _random_tokens(self, n_tokens: int) -> list[int]:
        """Return random tokens. Half of the results repeat a few tokens, so that n-gram drafts are found."""
        rng = self._rng
        n_unit = rng.choice([n_tokens, n_tokens, 2, 5, 12]) or 1
        unit = [rng.randrange(N_PLAIN_TOKENS) for _ in range(n_unit)]
        return (unit * (n_tokens // n_unit + 1))[:n_tokens]

    def _continued(self, history: Sequence[int]) -> list[int]:
        """Return the tokens of an earlier job with new tokens at the end. Sometimes it is cut before."""
        rng = self._rng
        n_kept = rng.choice([len(history), len(history), rng.randint(1, len(history))])
        return [*history[:n_kept], *self._random_tokens(rng.choice([0, 1, 2, 7]))]

    def _chat(self) -> list[dict[str, str]]:
        rng = self._rng
        turns = [("system", rng.choice(["Be brief.", "You are a cat that talks about the sea."]))] * rng.randrange(2)
        turns.append(("user", rng.choice(["Hi", "the end of it", "Tell me of the sea"])))
        if rng.random() < 0.4:
            turns += [("assistant", "Yes it is."), ("user", rng.choice(["Why?", "And then?"]))]
        return [{"role": role, "content": content} for role, content in turns]

    # ---- options

    def _some(self, choices: dict[str, tuple[float, Sequence[Any]]]) -> Options:
        drawn = {}
        for name, (probability, values) in choices.items():
            if self._rng.random() < probability:
                drawn[name] = self._rng.choice(values)
        return drawn

    def _sampling(self) -> Options:
        rng = self._rng
        chosen: Options = {"seed": rng.getrandbits(32), "temperature": rng.choice([0, 0, 0.3, 0.8, 1.0, 1.5])}
        chosen |= self._some({
            "top_k": (0.3, [0, 1, 5, 40, 400]), "top_p": (0.2, [0.5, 0.9, 1]), "min_p": (0.2, [0, 0.1]),
            "typical_p": (0.1, [0.5, 0.9]), "top_n_sigma": (0.1, [1, 2]), "xtc_probability": (0.1, [0.5]),
            "dynatemp_range": (0.1, [0.2]), "mirostat": (0.07, [1, 2]), "adaptive_target": (0.07, [0.3]),
            "min_keep": (0.1, [2, 5]), "samplers": (0.1, ["edkypmxt", "tkp", "etk", "kpi", "ekpit"]),
            "repeat_penalty": (0.2, [1.1, 0.9, 1.5]), "frequency_penalty": (0.1, [0.5, -0.3]),
            "presence_penalty": (0.1, [0.5, -0.3]), "penalty_last_n": (0.1, [-1, 0, 5, 1000]),
            "dry_multiplier": (0.1, [0.8]), "dry_penalty_last_n": (0.1, [-1, 20]),
        })  # fmt: skip
        if rng.random() < 0.15:
            n_biases = rng.choice([1, 5, 300])
            chosen["logit_bias"] = {
                rng.randrange(self._n_vocab): rng.choice([5.0, 2.0, -5.0, -1e9]) for _ in range(n_biases)
            }
        if self._has_grammars and rng.random() < 0.3:
            name = rng.choice(list(CONSTRAINTS))
            return chosen | {name: rng.choice(CONSTRAINTS[name])}
        return chosen | self._restrictions()

    def _ends(self) -> Options:
        chosen = self._some({
            "max_tokens": (0.9, [0, 1, 2, 5, 10, 20, 40, 80]), "ignore_eos": (0.4, [True]), "special": (0.2, [True]),
            "logprobs": (0.2, [0, 1, 5, 20]), "post_sampling_probs": (0.1, [True]),
            "prompt_logprobs": (0.25, [0, 1, 3, 20]),
            "reasoning_budget": (0.1, [0, 3, 10]), "timeout_s": (0.05, [0.01, 0.05, 0.3]),
            "n_indent": (0.1, [1, 4]), "generation_timeout_s": (0.05, [0.001, 0.05]),
        })  # fmt: skip
        if self._rng.random() < 0.2:
            chosen["stop"] = self._rng.sample(STOPS, self._rng.choice([1, 3]))
        return chosen | self._token_options(chosen.get("max_tokens"))

    def _token_options(self, max_tokens: int | None) -> Options:
        """Return the options about the tokens that end a job, and about those that it may generate."""
        rng = self._rng
        chosen = self._some({"min_tokens": (0.2, [1, 3, 12]), "include_stop": (0.3, [True])})
        if max_tokens is not None and "min_tokens" in chosen:
            chosen["min_tokens"] = min(chosen["min_tokens"], max_tokens)
        if rng.random() < 0.15:
            chosen["stop_token_ids"] = rng.sample(range(0, N_PLAIN_TOKENS, 2), rng.choice([1, 20, 100]))
        return chosen

    def _restrictions(self) -> Options:
        """Return what a job without a grammar may generate. One of the allowed tokens is odd, so no stop token."""
        rng, what = self._rng, self._rng.random()
        if what < 0.8:
            return {}
        if what < 0.9:
            return {"bad_words": rng.sample(STOPS, 3)}
        some = rng.sample(range(N_PLAIN_TOKENS), rng.choice([1, 30, 400]))
        return {"allowed_token_ids": [*some, rng.randrange(1, N_PLAIN_TOKENS, 2)]}

    def _sharing(self) -> Options:
        return self._some({
            "cache_salt": (0.2, ["x", "y", f"alone {self._rng.random()}"]), "cache_public": (0.15, [5, 20]),
            "cache_prompt": (0.1, [False]), "draft_max": (0.2, [0, 1, 3, 64]), "slot": (0.05, [0, 1, 3]),
            "lora": (0.4 if len(self._scales) > 1 else 0, self._scales),
        })  # fmt: skip

    def _queueing(self) -> Options:
        return self._some({
            "priority": (0.3, ["bulk"]), "tenant": (0.2, ["t1", "t2"]), "prompt_progress": (0.1, [True]),
        })  # fmt: skip
