"""Reads a form of fields and one file (multipart/form-data) while it arrives.

1. fields      small ones, in any order, before the file or behind it
2. the file    its bytes are given on as they come
3. end         the form is whole, or it broke off: then nothing of it counts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from edge.http.errors import BadRequest, UnsupportedBody

_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_MAX_HEADER_BYTES = 4096
_MAX_NAME = 512


@dataclass(slots=True)
class FormReader:
    """Takes the bytes of a form. `take` returns what there is of the file."""

    parser: MultipartParser = field(init=False)
    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    has_file: bool = False
    is_whole: bool = False
    _name: str = ""
    _is_file: bool = False
    _value: bytearray = field(default_factory=bytearray)
    _header: bytearray = field(default_factory=bytearray)
    _header_name: bytes = b""
    _file: list[bytes] = field(default_factory=list)

    @classmethod
    def of_headers(cls, headers: Mapping[str, str]) -> FormReader:
        """Raises `UnsupportedBody` for what is no form, `BadRequest` for an odd boundary."""
        kind, options = parse_options_header(headers.get("content-type", ""))
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise UnsupportedBody(
                "send a form with the fields purpose and file: 'Content-Type: "
                "multipart/form-data' with a boundary (curl: -F purpose=batch -F file=@FILE)"
            )
        reader = cls()
        reader.parser = reader._parser_of(boundary)
        return reader

    def _parser_of(self, boundary: bytes) -> MultipartParser:
        try:
            return MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_began,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_ended,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_ended,
                    "on_headers_finished": self._headers_ended,
                    "on_end": self._ended,
                },
            )
        except FormParserError as error:
            raise BadRequest(f"the form cannot be read: {error}", code="invalid_form") from None

    def take(self, data: bytes) -> bytes:
        """Returns the file's bytes among these. Raises `BadRequest` for what is no such form."""
        try:
            self.parser.write(data)
        except MultipartParseError as error:
            raise BadRequest(f"the form cannot be read: {error}", code="invalid_form") from None
        found = b"".join(self._file)
        self._file.clear()
        return found

    def _part_began(self) -> None:
        self._name, self._is_file = "", False
        self._value.clear()
        self._header.clear()
        self._header_name = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]
        self._check_header(len(self._header_name))

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]
        self._check_header(len(self._header))

    def _header_ended(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._header))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            self._is_file = b"filename" in options
            if self._is_file:
                self.filename = options[b"filename"].decode("utf-8", "replace")[:_MAX_NAME]
        self._header.clear()
        self._header_name = b""

    def _headers_ended(self) -> None:
        if self._name == "file":
            if self.has_file:
                raise BadRequest("the form has two files; send one", param="file")
            self.has_file = self._is_file = True
        elif self._is_file or not self._name:
            raise BadRequest("the form's file must be its field 'file'", param="file")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._file.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise BadRequest(
                f"a field of the form has more than {_MAX_FIELD_BYTES} bytes", param=self._name
            )

    def _part_ended(self) -> None:
        if self._is_file:
            return
        self.fields[self._name] = self._value.decode("utf-8", "replace")
        if len(self.fields) > _MAX_FIELDS:
            raise BadRequest(f"the form has more than {_MAX_FIELDS} fields")

    def _ended(self) -> None:
        self.is_whole = True

    def _check_header(self, size: int) -> None:
        if size > _MAX_HEADER_BYTES:
            raise BadRequest(f"a header of the form has more than {_MAX_HEADER_BYTES} bytes")
