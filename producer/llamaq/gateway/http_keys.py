"""Returns the names of the Redis keys that only the HTTP server uses. No other module of llamaq composes them.

See `llamaq.common.protocol.keys` for the form of the table.

| key                              | type             | life                                               |
| -------------------------------- | ---------------- | -------------------------------------------------- |
| llamaq:http:keys                 | hash             | API keys of `llamaq serve`, by their SHA-256       |
| llamaq:http:{name}:rate          | string           | a minute; when the next request of a key is due    |
| llamaq:http:{name}:open          | sorted set       | a minute; open requests of a key, by expiry        |
| llamaq:http:request:<key>        | string           | `result_ttl_s`; of an `Idempotency-Key`            |
| llamaq:{q:p}:response:<job id>   | string: JSON     | `response_ttl_s` and a week; of `/v1/responses`    |
| llamaq:http:{name}:files         | hash             | a month; records of the files of an API key        |
| llamaq:{hex}:file                | list of blocks   | as the record of the file                          |
| llamaq:{hex}:file-output         | list of blocks   | as the record; answers of a batch; also -errors    |
| llamaq:{hex}:batch               | hash             | a month after the batch ended                      |
| llamaq:http:{name}:batches       | sorted set       | 90 days; batch ids of an API key, by creation      |
| llamaq:http:{name}:turn          | string: batch id | a lease; the batch of a key with limits that runs  |
| llamaq:http:batches              | sorted set       | batches that have not ended, by end of their lease |
"""

from __future__ import annotations

import re

from llamaq.common.errors import InvalidRequest
from llamaq.common.protocol.keys import JobId, Keys

# The ids of a batch and of the files that it writes contain the same hexadecimal digits. So their keys have the same
# hash tag, and one script can use them all.
_BATCH_ID = re.compile(r"batch_([0-9a-f]{32})")
_FILE_ID = re.compile(r"file-([0-9a-f]{32})((?:-output|-errors)?)")


class HttpKeys(Keys):
    """All key names with one prefix, those of the HTTP server among them."""

    def http_keys(self) -> str:
        """Return the key of the API keys."""
        return f"{self.prefix}:http:keys"

    def http_rate(self, key_name: str) -> str:
        """Return the key of the time at which the next request of an API key is due."""
        return f"{self.prefix}:http:{{{key_name}}}:rate"

    def http_open(self, key_name: str) -> str:
        """Return the key of the open requests of an API key."""
        return f"{self.prefix}:http:{{{key_name}}}:open"

    def http_request(self, idempotency_key: str) -> str:
        """Return the key of a request with an `Idempotency-Key`."""
        return f"{self.prefix}:http:request:{idempotency_key}"

    def http_response(self, job_id: str) -> str:
        """Return the key of the record of a stored response. Raises `InvalidRequest` if the text is not a job id."""
        parsed = JobId.parse(job_id)
        return f"{self._partition(parsed.queue, parsed.partition)}:response:{job_id}"

    def http_files(self, owner: str) -> str:
        """Return the key of the records of an API key's files. The owner is empty if the server requires no API
        keys.
        """
        return f"{self.prefix}:http:{{{owner}}}:files"

    def http_file(self, file_id: str) -> str:
        """Return the key of the content of a file. Raises `InvalidRequest` if the text is not a file id."""
        found = _FILE_ID.fullmatch(file_id)
        if found is None:
            raise InvalidRequest(f"{file_id[:100]!r} is not a file id")
        return f"{self.prefix}:{{{found[1]}}}:file{found[2]}"

    def http_batch(self, batch_id: str) -> str:
        """Return the key of a batch. Raises `InvalidRequest` if the text is not a batch id."""
        found = _BATCH_ID.fullmatch(batch_id)
        if found is None:
            raise InvalidRequest(f"{batch_id[:100]!r} is not a batch id")
        return f"{self.prefix}:{{{found[1]}}}:batch"

    def http_batches(self, owner: str) -> str:
        """Return the key of the ids of an API key's batches."""
        return f"{self.prefix}:http:{{{owner}}}:batches"

    def http_turn(self, owner: str) -> str:
        """Return the key of the batch that runs, of an API key with limits."""
        return f"{self.prefix}:http:{{{owner}}}:turn"

    def http_open_batches(self) -> str:
        """Return the key of the batches that have not ended."""
        return f"{self.prefix}:http:batches"
