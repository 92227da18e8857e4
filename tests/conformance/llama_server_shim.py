"""Stands in for llama-server in the run against llama-server itself: starts it with the models that stand in.

llama.cpp's tests start this program with the names of models that would have to be downloaded. The variable
`LLAMAQ_CONFORMANCE_SERVER` has the path of llama-server and the files of the models, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

MODEL_FLAGS = ("--model", "--model-url", "--hf-repo", "--hf-file")
"""Flags with a value that name a model."""


def replace_models(flags: Sequence[str], models: Mapping[str, str]) -> list[str]:
    """Return the flags with the model that stands in for the one that they name.

    Args:
        flags: The flags of llama-server.
        models: The files `generation`, `embedding` and `reranking`.
    """
    kept = [
        flag
        for at, flag in enumerate(flags)
        if flag not in MODEL_FLAGS and (at == 0 or flags[at - 1] not in MODEL_FLAGS)
    ]
    kind = "reranking" if "--reranking" in flags else "embedding" if "--embedding" in flags else "generation"
    if "--chat-template" not in flags:
        # Without Jinja, llama-server knows the templates of well-known models alone, and not that of the demo model.
        kept = ["--jinja" if flag == "--no-jinja" else flag for flag in kept]
    return ["--model", models[kind], "--threads", "1", *kept]


if __name__ == "__main__":
    chosen = json.loads(os.environ["LLAMAQ_CONFORMANCE_SERVER"])
    os.execv(chosen["server"], [chosen["server"], *replace_models(sys.argv[1:], chosen["models"])])
