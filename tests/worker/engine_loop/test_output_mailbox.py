"""The mailbox between the threads loses nothing and keeps the order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from llamaq.common.protocol.job_outcome import JobStats
from llamaq.worker.core.outputs import JobEnded, NewToken
from llamaq.worker.engine_loop.output_mailbox import JobWithdrawn, Message, OutputMailbox
from llamaq.worker.testing.fake_job import make_job


class Receiver:
    """Collects the messages, and the threads that delivered them."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.threads: set[threading.Thread] = set()

    def receive(self, messages: Sequence[Message]) -> None:
        self.messages += messages
        self.threads.add(threading.current_thread())

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.messages) < count:  # noqa: ASYNC110  # another thread puts them
                await asyncio.sleep(0.001)


async def test_messages_that_were_put_before_the_receiver_is_attached_are_delivered_first() -> None:
    mailbox, receiver, job = OutputMailbox(), Receiver(), make_job("x")
    early: list[Message] = [NewToken(job, 1, "a", 0.0), NewToken(job, 2, "b", 0.0)]
    mailbox.put(early)
    assert repr(mailbox) == "<OutputMailbox 1 undelivered>"
    mailbox.attach(receiver.receive)
    late: list[Message] = [JobEnded(job, JobStats())]
    mailbox.put(late)
    await receiver.wait_for(3)
    assert receiver.messages == early + late


async def test_outputs_and_withdrawn_jobs_of_another_thread_arrive_in_order_on_the_loop() -> None:
    mailbox, receiver, job = OutputMailbox(), Receiver(), make_job("x")
    withdrawn = JobWithdrawn(make_job("y"))
    sent: list[Message] = []
    for number in range(500):
        sent += [NewToken(job, number, "", 0.0), withdrawn]

    def put_all() -> None:
        for place in range(0, len(sent), 2):
            mailbox.put(sent[place : place + 1])
            mailbox.put(sent[place + 1 : place + 2])

    thread = threading.Thread(target=put_all)
    thread.start()
    mailbox.attach(receiver.receive)  # while the other thread puts
    await receiver.wait_for(len(sent))
    thread.join()
    assert receiver.messages == sent
    assert receiver.threads == {threading.current_thread()}


async def test_a_put_of_nothing_delivers_nothing() -> None:
    mailbox, receiver = OutputMailbox(), Receiver()
    mailbox.attach(receiver.receive)
    mailbox.put([])
    await asyncio.sleep(0.01)
    assert receiver.threads == set()


def test_a_put_after_the_end_of_the_loop_does_not_raise() -> None:
    mailbox, receiver = OutputMailbox(), Receiver()

    async def attach() -> None:
        mailbox.attach(receiver.receive)

    asyncio.run(attach())
    mailbox.put([JobWithdrawn(make_job("x"))])
    assert receiver.messages == []
