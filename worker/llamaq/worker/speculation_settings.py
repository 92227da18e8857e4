"""A worker's settings of speculation. They have the names that llama.cpp's own programs use."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from llamaq.common.protocol.output_params import MAX_DRAFT_TOKENS
from llamaq.worker.model_settings import MAX_INT32, CacheType
from llamaq.worker.thread_settings import MAX_THREADS


class SpeculationSettings(BaseModel):
    """Speculation. The worker drafts the next tokens of its jobs, and the model verifies them in one batch."""

    speculation: Literal["off", "ngram", "model"] = Field(
        "off",
        description="`ngram`: when the last tokens of a job occurred before, in its prompt or its output, draft the "
        "tokens that followed them. `model`: a small model drafts, see `model_draft`. The output is the same, and "
        "drafts are made only where they promise a gain. Needs a model whose KV cells can be removed one by one.",
    )
    draft_max: int = Field(
        16,
        ge=1,
        le=MAX_DRAFT_TOKENS,
        description="With `speculation`: largest number of tokens that are drafted and verified at once for one job.",
    )
    model_draft: str | None = Field(
        None,
        description="With `speculation` `model`: the draft model, a path or an `hf:` name as in `model`. It must have "
        "the vocabulary of the model, and no recurrent layers. It has as many KV cells as the model.",
    )
    draft_p_min: float = Field(
        0.0,
        ge=0,
        le=1,
        description="A draft ends before a token that the draft model considers less probable. 0: it never does.",
    )
    n_gpu_layers_draft: int = Field(
        -1,
        ge=-1,
        le=MAX_INT32,
        description="Number of layers of the draft model that the GPU computes. -1: all layers.",
    )
    n_threads_draft: int | None = Field(
        None,
        ge=1,
        le=MAX_THREADS,
        description="Number of threads of the draft model, even while other workers compute. If not set: as many as "
        "for the model.",
    )
    cache_type_k_draft: CacheType = Field(
        "f16", description="Data type of the keys in the KV cells of the draft model, as in `cache_type_k`."
    )
    cache_type_v_draft: CacheType = Field(
        "f16", description="Data type of the values in the KV cells of the draft model, as in `cache_type_v`."
    )

    @model_validator(mode="after")
    def _check_draft_model(self) -> Self:
        if self.speculation == "model" and self.model_draft is None:
            raise ValueError(
                "--speculation (LLAMAQ_SPECULATION): model needs a draft model; give its file with --model-draft"
            )
        if self.speculation != "model" and self.model_draft is not None:
            raise ValueError(
                f"--model-draft (LLAMAQ_MODEL_DRAFT): a draft model is used only with --speculation model, but "
                f"--speculation is {self.speculation}"
            )
        return self
