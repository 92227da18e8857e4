"""Puts the items of stored responses in place of the references to them in an input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamaq.common.errors import JobNotFound
from llamaq.common.protocol.job_outcome import JobState
from llamaq.gateway.http.errors import RequestRefused, not_found
from llamaq.gateway.model_knowledge import ModelKnowledge
from llamaq.gateway.responses.answer_reader import read_response
from llamaq.gateway.responses.input_items import input_items
from llamaq.gateway.responses.record import ID_PREFIX, ResponseRecord, ResponseStore

Item = Mapping[str, Any]


async def with_referenced_items(
    body: Mapping[str, Any], models: ModelKnowledge, store: ResponseStore, owner: str | None
) -> Mapping[str, Any]:
    """Return a body whose `input` has no references, but the items that they mean.

    Args:
        body: The body of a request.
        models: What is known about the models.
        store: The stored responses.
        owner: Name of the API key that asks. None: the server requires none.

    Raises:
        RequestRefused: There is no such item, or it belongs to another key: 404. The message names the item.
    """
    given = body.get("input")
    if not isinstance(given, list) or not any(_is_reference(item) for item in given):
        return body
    stored = _StoredItems(models, store, owner)
    items = [
        await stored.find(f"input.{number}", item["id"]) if _is_reference(item) else item
        for number, item in enumerate(given)
    ]
    return {**body, "input": items}


def _is_reference(item: Any) -> bool:
    match item:
        case {"type": "item_reference", "id": str()}:
            return True
        case {"id": str()} if item.get("type") is None:  # OpenAI's schema does not require the type
            return not item.keys() & {"role", "content"}
    return False


class _StoredItems:
    """The items of stored responses. Those of one response are read once for all references of a request."""

    def __init__(self, models: ModelKnowledge, store: ResponseStore, owner: str | None) -> None:
        self._models = models
        self._store = store
        self._owner = owner
        self._known: dict[str, dict[str, Item]] = {}
        """The items by their ids, for each job that references have named so far."""

    async def find(self, place: str, item_id: str) -> Item:
        """Return an item. An id is a prefix, the job of the response and the number of the item.

        Args:
            place: The place of the reference in the request.
            item_id: The id of the item.

        Raises:
            RequestRefused: There is no such item: 404.
        """
        job_id = item_id.partition("_")[2].rpartition("_")[0]
        if job_id not in self._known:
            self._known[job_id] = await self._read(job_id)
        item = self._known[job_id].get(item_id)
        if item is None:
            raise not_found(
                f"{place}: there is no stored item {item_id[:150]!r}: the id is wrong, or its response has not ended, "
                "has expired, was deleted or was not stored; send the item itself (many clients do with `store`: false)"
            )
        return item

    async def _read(self, job_id: str) -> dict[str, Item]:
        """Return the items of a response by their ids. There are none if the response is not known."""
        try:
            _, record = await self._store.read(ID_PREFIX + job_id, self._owner)
        except RequestRefused:
            return {}
        items = [*input_items(job_id, record), *await self._output(job_id, record)]
        return {item["id"]: item for item in items}

    async def _output(self, job_id: str, record: ResponseRecord) -> list[Item]:
        """Return the items of the answer of a response. There are none before its end."""
        job = self._models.queues.default.job(job_id)
        try:
            if (await job.status()).state is not JobState.FINISHED:
                return []
            result = await job.result()
        except JobNotFound:
            return []
        # The probabilities of an answer are no part of a prompt.
        plain = record.model_copy(update={"has_logprobs": False})
        output: list[Item] = (await read_response(self._models, job_id, plain, result))["output"]
        return output
