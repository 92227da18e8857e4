"""Splits the body of a form upload into its parts while it arrives."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from llamaq.gateway.http.errors import invalid

MAX_FIELD_BYTES = 4096
MAX_HEADER_BYTES = 8192
"""Largest size of all headers of a part. python-multipart has a limit of its own since version 0.0.27."""
MAX_PARTS = 16
MAX_FILENAME_CHARS = 255
ESCAPES = ((b"%0A", b"\n"), (b"%0D", b"\r"), (b"%22", b'"'))
"""What clients write for characters that would end a name, and these characters (WHATWG's HTML: "multipart/form-data
encoding algorithm"). No other character is escaped, also no `%`."""


class FormParts:
    """The parts of a form. Its fields are kept, and the content of its file is passed on."""

    def __init__(self, content_type: str) -> None:
        """Begin to read.

        Args:
            content_type: The header `Content-Type` of the request.

        Raises:
            RequestRefused: It names no form.
        """
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise invalid("the body is no form: Content-Type: multipart/form-data with a boundary is required")
        self.fields: dict[str, str] = {}
        """The complete fields by their names, without the file."""
        self.filename: str | None = None
        """Name of the file. None: the part has not arrived yet."""
        self.is_complete = False
        """Whether the end of the form has arrived."""
        self._header, self._value = bytearray(), bytearray()
        self._n_header_bytes = 0
        self._disposition: dict[bytes, bytes] = {}
        self._field = bytearray()
        self._n_parts = 0
        self._is_file = False
        self._content: list[bytes] = []
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_to_header,
                    "on_header_value": self._add_to_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._add_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as exc:
            raise invalid(f"Content-Type: {exc}") from exc

    def __repr__(self) -> str:
        return f"<FormParts fields={sorted(self.fields)} filename={self.filename!r}>"

    def feed(self, data: bytes) -> bytes:
        """Read bytes of the body, and return the bytes of the file among them.

        Raises:
            RequestRefused: The body is no form, or has fields that are too large or too many.
        """
        try:
            self._parser.write(data)
        except FormParserError as exc:
            raise invalid(f"the form is not valid: {exc}") from exc
        content, self._content = b"".join(self._content), []
        return content

    def _begin_part(self) -> None:
        self._n_parts += 1
        if self._n_parts > MAX_PARTS:
            raise invalid(f"the form has more than {MAX_PARTS} fields")
        self._disposition, self._is_file, self._n_header_bytes = {}, False, 0
        self._field.clear()

    def _add_to_header(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header += data[start:end]

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._value += data[start:end]

    def _count_header(self, n_bytes: int) -> None:
        self._n_header_bytes += n_bytes
        if self._n_header_bytes > MAX_HEADER_BYTES:
            raise invalid(f"the form has a part with headers of more than {MAX_HEADER_BYTES} bytes")

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, self._disposition = parse_options_header(self._value.decode("latin-1"))
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        self._is_file = self._disposition.get(b"name") == b"file"
        if self._is_file:
            if self.filename is not None:
                raise invalid("file: the form has more than one", "file")
            name = _unescaped(self._disposition.get(b"filename", b"file")).decode(errors="replace")
            self.filename = "".join(char for char in name if char.isprintable())[:MAX_FILENAME_CHARS]

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._content.append(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > MAX_FIELD_BYTES:
            raise invalid(f"the form has a field of more than {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if not self._is_file:
            name = self._disposition.get(b"name", b"").decode(errors="replace")
            self.fields[name] = self._field.decode(errors="replace")

    def _end(self) -> None:
        self.is_complete = True


def _unescaped(name: bytes) -> bytes:
    for escape, character in ESCAPES:
        name = name.replace(escape, character)
    return name
