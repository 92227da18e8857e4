"""Conversations of `/v1/responses` that are shortened, because the request has `truncation: "auto"`."""

from __future__ import annotations

import pytest

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.job_request import MAX_MESSAGES
from llamaq.gateway.prepared import response
from llamaq.gateway.prepared.response import conversation_of
from llamaq.gateway.responses.input_items import Messages
from llamaq.gateway.responses.request_body import ResponseBody, read_response_body

RULES: Messages = [{"role": "system", "content": "Be kind."}, {"role": "system", "content": "Be short."}]


def turns(n: int) -> Messages:
    """Return questions and answers, from the oldest to the newest."""
    return [{"role": role, "content": str(number)} for number in range(n) for role in ("user", "assistant")]


async def shortened(messages: Messages, limit: int) -> Messages:
    async def count(chat: Messages) -> int:
        return len(chat)

    return await response._newest_that_fit(messages, limit, count)


@pytest.mark.parametrize("rules", [[], RULES[:1], RULES])
async def test_the_system_messages_at_the_beginning_are_kept(rules: Messages) -> None:
    chat = [*rules, *turns(9)]
    assert await shortened(chat, len(chat)) == chat
    assert await shortened(chat, len(rules) + 5) == [*rules, *turns(9)[-4:]]
    assert await shortened(chat, 1) == [*rules, *turns(9)[-2:]]
    assert await shortened(rules, 0) == rules
    assert await shortened([*rules, *turns(1)], 0) == [*rules, *turns(1)]


async def test_a_later_system_message_belongs_to_its_turn() -> None:
    chat = [*turns(1), *RULES[:1], *turns(3)]
    assert await shortened(chat, 5) == chat[-4:]


def asked(**fields: object) -> ResponseBody:
    return read_response_body({"input": "Bye", "instructions": "Be wise.", "truncation": "auto", **fields})


@pytest.mark.parametrize("rules", [[], RULES])
def test_a_conversation_with_too_many_messages_is_shortened(rules: Messages) -> None:
    history = [*rules, *turns(MAX_MESSAGES)]
    body = asked()
    found = conversation_of(body, history)
    assert MAX_MESSAGES - 2 <= len(found) + len(body.instructions) <= MAX_MESSAGES
    assert found[: len(rules)] == rules
    assert found[len(rules)]["role"] == "user"
    assert found[len(rules) :] == [*history, *body.messages][len(rules) - len(found) :]
    assert conversation_of(body, turns(4)) == [*turns(4), *body.messages]
    with pytest.raises(InvalidRequest, match=f"{len(history) + 2} messages are more than"):
        conversation_of(asked(truncation="disabled"), history)


def test_the_messages_of_the_request_are_not_shortened() -> None:
    body = asked(input=turns(MAX_MESSAGES // 2))
    assert len(body.messages) == MAX_MESSAGES
    with pytest.raises(InvalidRequest, match="messages are more than"):
        conversation_of(body, turns(3))
