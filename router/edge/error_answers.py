"""Answers errors of the application: those that are known, of the framework, and bugs."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from edge.http import headers as names
from edge.http.errors import HttpError, error_body
from edge.http.unknown_path import unknown_path


def add_error_answers(app: FastAPI) -> None:
    """Has every error of an application answered as the error object of the OpenAI API."""
    app.add_exception_handler(HttpError, _answer_known_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_bug)


async def _answer_known_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return _error_response(request, error.body(), error.status, error.headers())


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        known = unknown_path(request)
        return await _answer_known_error(request, known)
    body = error_body(f"{error.detail}.", "invalid_request_error", f"http_{error.status_code}")
    return _error_response(request, body, error.status_code, error.headers or {})


async def _answer_bug(request: Request, _error: Exception) -> Response:
    body = error_body("The router failed on this request.", "server_error", "internal_error")
    return _error_response(request, body, 500, {})


def _error_response(
    request: Request, body: bytes, status: int, headers: Mapping[str, str]
) -> Response:
    name = request.state.request_id
    return Response(body, status, {**headers, names.REQUEST_ID: name}, "application/json")
