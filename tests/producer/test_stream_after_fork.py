"""A stream that was opened before a fork belongs to the process that opened it."""

from __future__ import annotations

from tests.support.development_mode import complaints, run_script

from llamaq.producer.testing import serving

CODE = """
import os, signal, sys, warnings
from llamaq.producer import Client

# Python 3.12 and newer warn at every fork of a process that has threads.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
client = Client(*sys.argv[1:])
stream = client.stream("a")
results = client.map(["a", "b"], window=1, max_tokens=5)
job = client.submit("a")
chunks = job.stream()
next(chunks)
next(results)
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    print("child", os.waitstatus_to_exitcode(status), flush=True)
    print("parent", "".join(chunk.text for chunk in stream), len(list(results)), flush=True)
    client.close()
else:
    signal.alarm(20)  # it must not wait forever
    for one in (stream, chunks, results):
        try:
            next(one)
        except RuntimeError as error:
            print(error, flush=True)
    stream.close()
    print("again", "".join(chunk.text for chunk in client.job(stream.job.id).stream()), flush=True)
"""


def test_a_stream_that_was_opened_before_a_fork_is_refused_in_the_child(redis_url: str, queue: str) -> None:
    with serving(redis_url, queue, lambda _: ["one ", "two"]):
        process = run_script(CODE, redis_url, queue)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, complaints(err)) == (0, [])
    lines = out.splitlines()
    assert [line for line in lines if "before the fork" not in line] == ["again one two", "child 0", "parent one two 1"]
    assert sum("open it again" in line for line in lines) == 3
