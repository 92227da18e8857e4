"""/v1/files: OpenAI's endpoints for the inputs and outputs of batches."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llamaq.gateway.context import context_of
from llamaq.gateway.files.form_parts import FormParts
from llamaq.gateway.files.record import (
    UPLOAD_PURPOSE,
    FileRecord,
    file_object,
    missing_file,
    read_expiry,
    too_large_file,
)
from llamaq.gateway.files.store import FileStore
from llamaq.gateway.files.upload_body import UploadBody
from llamaq.gateway.http.errors import RequestRefused, invalid
from llamaq.gateway.http.json_body import json_response
from llamaq.gateway.http.query_parameters import page_of, read_page
from llamaq.gateway.http.request_lifetime import ClientGone, RestMissing
from llamaq.gateway.queue_of_request import owner_of

log = logging.getLogger(__name__)

MAX_LISTED = 10_000
FORM_BYTES = 64 * 1024
"""A body may be larger than its file by this number of bytes."""


async def create(request: Request) -> Response:
    """Store a file of requests."""
    body = UploadBody(request.receive, silence_s=context_of(request).settings.body_timeout_s)
    try:
        return json_response(file_object(await _upload(request, body)))
    except ClientGone:
        return Response(status_code=400)  # the client has gone, but Starlette requires a response
    except RequestRefused as exc:
        if not body.has_begun and "expect" in request.headers:  # the client sends no body before it is told to
            exc.headers["Connection"] = "close"
        else:
            await body.discard()
        raise
    except BaseException:
        await body.discard()
        raise


async def _upload(request: Request, body: UploadBody) -> FileRecord:
    settings = context_of(request).settings
    form = FormParts(request.headers.get("content-type", ""))
    announced = request.headers.get("content-length", "")
    most_bytes = settings.max_file_bytes
    if announced.isdecimal():
        if int(announced) > settings.max_file_bytes + FORM_BYTES:
            raise too_large_file(settings.max_file_bytes)
        most_bytes = min(most_bytes, int(announced))
    upload = await files_of(request).begin_upload(most_bytes)
    n_bytes = 0
    try:
        async for data in body.parts():
            n_bytes += len(data)
            if n_bytes > settings.max_file_bytes + FORM_BYTES:  # a body in chunks announces no length
                raise too_large_file(settings.max_file_bytes)
            if content := form.feed(data):
                await upload.write(content)
        if not form.is_complete or form.filename is None:
            raise invalid("file: the form is incomplete; the fields `file` and `purpose` are required", "file")
        if form.fields.get("purpose") != UPLOAD_PURPOSE:
            raise invalid("purpose: llamaq stores files of batches only; use 'batch'", "purpose")
        ttl_s = read_expiry(_expiry_of(form.fields), "expires_after", settings.file_ttl_s)
        return await upload.finish(form.filename, UPLOAD_PURPOSE, ttl_s)
    except BaseException:
        await upload.abandon()
        raise


def _expiry_of(fields: dict[str, str]) -> dict[str, Any] | None:
    """Return the object that a form spells as `expires_after[anchor]` and `expires_after[seconds]`."""
    prefix = "expires_after["
    return {name[len(prefix) : -1]: value for name, value in fields.items() if name.startswith(prefix)} or None


async def list_files(request: Request) -> Response:
    """Return the files of the API key."""
    purpose = request.query_params.get("purpose")
    page = read_page(request, most=MAX_LISTED, default=MAX_LISTED)
    records = [each for each in await files_of(request).listed() if purpose in (None, each.purpose)]
    return json_response(page_of([file_object(each) for each in records], page))


async def retrieve(request: Request) -> Response:
    """Return the record of a file."""
    return json_response(file_object(await files_of(request).find(request.path_params["file"])))


async def content(request: Request) -> Response:
    """Return the content of a file."""
    files = files_of(request)
    record = await files.find(request.path_params["file"])
    headers = {"Content-Length": str(record.n_bytes), "X-Content-Type-Options": "nosniff"}
    return StreamingResponse(_whole(files, record), media_type="application/octet-stream", headers=headers)


async def _whole(files: FileStore, record: FileRecord) -> AsyncIterator[bytes]:
    """Yield the content of a file.

    Raises:
        RestMissing: The file was deleted before its end was read.
    """
    n_missing = record.n_bytes
    async for data in files.read(record):
        n_missing -= len(data)
        yield data
    if n_missing:
        log.info("file.deleted_while_read id=%s missing_bytes=%d", record.id, n_missing)
        raise RestMissing


async def delete(request: Request) -> Response:
    """Remove a file."""
    file_id = request.path_params["file"]
    if not await files_of(request).delete(file_id):
        raise missing_file(file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


def files_of(request: Request) -> FileStore:
    """Return the files of the API key of a request."""
    context = context_of(request)
    client = context.queues.default
    most_bytes = context.settings.max_files_bytes
    return FileStore(client.redis, client.keys, owner_of(request), max_files_bytes=most_bytes)
