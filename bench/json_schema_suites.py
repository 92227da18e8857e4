"""Which JSON schemas of public suites does a worker accept, and does it tell their valid from their invalid instances?

    python bench/json_schema_suites.py FOLDER...

Each folder is a suite; `json_schema_suite_files.py` describes its files. The repository contains no suite. A schema is
`accepted`, `refused` with a reason, or `failed`: its trial takes too much time or memory, or ends with another error.

Instances of accepted schemas are counted so:

- `wrong_accepts`: invalid, but the grammar allows them. An output could have this value and not match its schema.
- `wrong_rejects`: valid, but the grammar allows no spelling that is tried. The grammar is narrower than the schema.
- `only_respelled`: valid, but the grammar needs another order of the properties, or numbers such as `1` for `1.0`.

`compile_ms` is the time from the request to the compiled constraint, `untried_ms` the same without the trial in the
grammar process. The largest accepted schemas without instances are sampled, once greedily and then at random. A
complete output that does not match its schema is a fault of the worker.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import Figures, Plan, note, run, show, start_stack
from job_timings import spread
from json_schema_coverage import TEMPERATURE, Answer, Coverage, sample
from json_schema_suite_files import Case, read_cases, spellings
from llamaq.common.errors import JobRejected, LlamaqError
from llamaq.common.protocol.job_request import JobParams
from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker.engine.gguf_vocab import extract_vocab
from llamaq.worker.generation.grammar.json_schemas import json_schema_grammar, plain_schema_grammar
from llamaq.worker.generation.grammar.large_stack import on_large_stack
from llamaq.worker.generation.grammar.sandbox import GrammarSandbox
from llamaq.worker.generation.grammar.token_constraint import ConstraintTokenizer, TokenConstraint

QUICK_N_SCHEMAS = 20
N_SAMPLED, QUICK_N_SAMPLED = 20, 1
N_OUTPUTS, QUICK_N_OUTPUTS = 4, 1
MAX_TOKENS, QUICK_MAX_TOKENS = 512, 64
SLOW_MS = 1000.0
MAX_CHARS = 300
"""Length of the texts of deviations in the output."""
_TOO_EXPENSIVE = re.compile(r"takes more than|too much memory|too busy|took .* for one token")
_KEYWORD = re.compile(r"`([^`]+)` at ")


@dataclass(slots=True)
class Suite:
    """What is found about the schemas of one folder."""

    n_schemas: int = 0
    accepted: list[Case] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Maps the name of each refused schema to the message."""
    failed: dict[str, str] = field(default_factory=dict)
    n_boolean: int = 0
    """Schemas that are `true` or `false`. A request has none of them, because its schema is an object."""
    n_plain: int = 0
    compile_ms: list[float] = field(default_factory=list)
    untried_ms: list[float] = field(default_factory=list)
    slow: dict[str, float] = field(default_factory=dict)
    """Maps schemas that take more than `SLOW_MS` to their times, the refused ones included."""
    n_valid: int = 0
    n_invalid: int = 0
    only_respelled: list[str] = field(default_factory=list)
    wrong_rejects: list[str] = field(default_factory=list)
    wrong_accepts: list[str] = field(default_factory=list)

    def figures(self) -> Figures:
        """Return all counts and deviations."""
        reasons = Counter(_reason(message) for message in self.refused.values())
        return {
            "schemas": self.n_schemas,
            "accepted": len(self.accepted),
            "refused": len(self.refused),
            "failed": len(self.failed),
            "boolean": self.n_boolean,
            "plain": self.n_plain,
            "compile_ms": spread(self.compile_ms),
            "untried_ms": spread(self.untried_ms),
            "valid": self.n_valid,
            "only_respelled": len(self.only_respelled),
            "wrong_rejects": len(self.wrong_rejects),
            "invalid": self.n_invalid,
            "wrong_accepts": len(self.wrong_accepts),
            "reasons": dict(reasons.most_common()),
            "slow_ms": self.slow,
            "failures": self.failed,
            "deviations": {"wrong_accepts": self.wrong_accepts, "wrong_rejects": self.wrong_rejects},
        }


class SuiteCheck:
    """Compiles schemas as a worker does, and checks their instances.

    Args:
        vocab: The model's vocabulary.
        sandbox: The grammar process of this vocabulary.
    """

    def __init__(self, vocab: Vocab, sandbox: GrammarSandbox) -> None:
        self._vocab = vocab
        self._sandbox = sandbox
        self._tokenizer = ConstraintTokenizer(vocab)
        self._bytes = {vocab.piece(token): token for token in range(vocab.n_tokens) if len(vocab.piece(token)) == 1}

    def run(self, cases: Sequence[Case]) -> Suite:
        """Return what is found about these schemas."""
        suite = Suite()
        for case in cases:
            suite.n_schemas += 1
            if isinstance(case.schema, dict):
                self._add(suite, case)
            else:
                suite.n_boolean += 1
        return suite

    def _add(self, suite: Suite, case: Case) -> None:
        start_s = time.perf_counter()
        constraint: TokenConstraint | None = None
        try:
            constraint = self._tokenizer.compile(self._sandbox.check(JobParams(json_schema=case.schema)).text)
        except JobRejected as exc:
            found = suite.failed if _TOO_EXPENSIVE.search(exc.message) else suite.refused
            found[case.name] = exc.message[:MAX_CHARS]
        except Exception as exc:  # noqa: BLE001  # a fault of the worker, which is to be found here
            suite.failed[case.name] = repr(exc)[:MAX_CHARS]
        elapsed_ms = (time.perf_counter() - start_s) * 1000
        if elapsed_ms > SLOW_MS:
            suite.slow[case.name] = round(elapsed_ms)
        if constraint is None:
            return
        suite.accepted.append(case)
        suite.n_plain += plain_schema_grammar(case.schema) is not None
        suite.compile_ms.append(elapsed_ms)
        suite.untried_ms.append(_milliseconds(partial(self._compile_untried, case.schema)))
        self._check_instances(suite, case, constraint)

    def _compile_untried(self, schema: dict[str, Any]) -> None:
        grammar = json_schema_grammar(schema)
        on_large_stack(lambda: self._tokenizer.compile_on_this_stack(grammar))

    def _check_instances(self, suite: Suite, case: Case, constraint: TokenConstraint) -> None:
        for instance in case.instances:
            text = json.dumps(instance.value, ensure_ascii=False)
            told = f"{case.name}: {instance.description}: {text[:MAX_CHARS]} for {json.dumps(case.schema)[:MAX_CHARS]}"
            texts = spellings(instance.value, plain_numbers=instance.is_valid)
            allowed = next((one for one in texts if self._allows(constraint, one)), None)
            if instance.is_valid:
                suite.n_valid += 1
                if allowed is None:
                    suite.wrong_rejects.append(told)
                elif allowed != text:
                    suite.only_respelled.append(told)
            else:
                suite.n_invalid += 1
                if allowed is not None:
                    suite.wrong_accepts.append(told)

    def _allows(self, constraint: TokenConstraint, text: str) -> bool:
        """Return whether a constraint allows a text, byte by byte, and an end token after it."""
        constraint = constraint.copy()
        try:
            constraint.accept([self._bytes[bytes([byte])] for byte in text.encode()])
            return constraint.end_token_in(constraint.allowed_tokens()) is not None
        except JobRejected:
            return False


def _milliseconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return (time.perf_counter() - start_s) * 1000


def _reason(message: str) -> str:
    """Return the keyword that a message names, or the message."""
    match = _KEYWORD.search(message)
    return match[1] if match else message.partition("cannot be used: ")[2][:80] or message[:80]


def sample_largest(plan: Plan, cases: Sequence[Case]) -> Figures:
    """Return the numbers of complete and valid outputs under the largest schemas without instances."""
    without = [case for case in cases if not case.instances]
    largest = sorted(without, key=lambda case: -len(json.dumps(case.schema)))
    chosen = [(case.name, case.schema) for case in largest[: QUICK_N_SAMPLED if plan.quick else N_SAMPLED]]
    n_random, max_tokens = (QUICK_N_OUTPUTS, QUICK_MAX_TOKENS) if plan.quick else (N_OUTPUTS, MAX_TOKENS)
    if not chosen:
        return {}
    answers: list[list[Answer]] = [[] for _ in chosen]
    with start_stack([plan.settings()]) as stack:
        for n_outputs, temperature in ((1, 0.0), (n_random, TEMPERATURE)):
            work = partial(sample, chosen, n_outputs, max_tokens, plan.seed, temperature=temperature)
            for number, answer in enumerate(stack.run(work)):
                answers[number // n_outputs].append(answer)
    coverage = Coverage()
    for (name, schema), of_schema in zip(chosen, answers, strict=True):
        coverage.add(name, schema, of_schema)
    return {"schemas": len(chosen), **coverage.figures()}


def measure(plan: Plan) -> Figures:
    """Return the figures of each folder."""
    vocab = Vocab.from_blob(extract_vocab(plan.model))
    sandbox = GrammarSandbox(vocab)
    suites: dict[str, Suite] = {}
    try:
        check = SuiteCheck(vocab, sandbox)
        sandbox.check(JobParams(regex="a"))  # starts the process
        for folder in plan.folders:
            cases = list(read_cases(folder))
            if not cases:
                raise LlamaqError(f"{folder} has no file with schemas")
            suites[_name(folder)] = check.run(cases[:QUICK_N_SCHEMAS] if plan.quick else cases)
            note(f"{_name(folder)}: {len(cases)} schemas")
    finally:
        sandbox.close()
    sampled = sample_largest(plan, [case for suite in suites.values() for case in suite.accepted])
    figures = {name: suite.figures() for name, suite in suites.items()}
    for name, one in figures.items():
        for kind, texts in one["deviations"].items():
            for text in texts:
                note(f"{name}: {kind}: {text}")
        for kind in ("failures", "slow_ms", "reasons"):
            for text, value in one[kind].items():
                note(f"{name}: {kind}: {text}: {value}")
    columns = (
        *("schemas", "accepted", "refused", "failed", "plain"),
        *("valid", "only_respelled", "wrong_rejects", "invalid", "wrong_accepts"),
    )
    rows = [(name, *(one[column] for column in columns)) for name, one in figures.items()]
    show("JSON schemas of public suites", ("suite", *(column.replace("_", " ") for column in columns)), rows)
    return {"n_vocab": vocab.n_tokens, "suites": figures, "sampled": sampled}


def _name(folder: Path) -> str:
    return "/".join(folder.resolve().parts[-2:])


if __name__ == "__main__":
    run(measure, needs_folders=True)
