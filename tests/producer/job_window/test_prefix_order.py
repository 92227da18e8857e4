"""Waiting requests leave in the order of their prompts, so that neighbours share prefixes."""

from __future__ import annotations

from llamaq.common.protocol.job_request import JobRequest
from llamaq.producer import Message
from llamaq.producer.job_window.prefix_order import PrefixOrder
from llamaq.producer.job_window.submit_rate_limit import SubmitRateLimit
from llamaq.producer.job_window.window_job import WindowJob


def job(number: int, prompt: str) -> WindowJob[int]:
    return WindowJob(number, JobRequest(prompt=prompt))


def test_requests_that_share_a_prefix_leave_together_whatever_the_order_of_the_rows() -> None:
    order: PrefixOrder[int] = PrefixOrder()
    for number in range(12):
        order.add(job(number, f"{'abc'[number % 3] * 100} question {number}"))
    left = [one.request.prompt[0] for one in order.pop(100) if one.request.prompt]
    assert "".join(left) == "aaaabbbbcccc"
    assert len(order) == 0


def test_a_request_leaves_before_those_that_were_added_after_the_sort() -> None:
    order: PrefixOrder[int] = PrefixOrder()
    for number, prompt in enumerate(["c", "d"]):
        order.add(job(number, prompt))
    first = order.pop(1)
    order.add(job(2, "a"))
    order.put_back(first)
    assert [one.tag for one in order.pop(3)] == [0, 1, 2]


def test_chats_and_tokens_are_sorted_by_their_beginnings() -> None:
    order: PrefixOrder[str] = PrefixOrder()
    for name in ("x", "y"):
        for question in range(2):
            messages = (Message(role="system", content=name * 50), Message(role="user", content=str(question)))
            order.add(WindowJob(name, JobRequest(messages=messages)))
            order.add(WindowJob(name * 2, JobRequest(tokens=(ord(name), question))))
    assert [one.tag for one in order.pop(8)] == ["xx", "xx", "yy", "yy", "x", "x", "y", "y"]


def test_the_pace_allows_the_rate_and_no_burst_after_a_pause() -> None:
    now_s = 0.0
    limit = SubmitRateLimit(10.0, lambda: now_s)
    assert limit.n_allowed(100) == 1
    limit.count(1)
    assert (limit.n_allowed(100), limit.delay_s) == (0, 0.1)
    now_s = 60.0
    assert limit.n_allowed(100) == 10
    limit.count(10)
    now_s = 60.25
    assert limit.n_allowed(100) == 2
    assert SubmitRateLimit(None, lambda: now_s).n_allowed(7) == 7
