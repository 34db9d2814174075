"""Answers of the API that are not what was asked for, as Kubernetes words them."""

from __future__ import annotations

from tests.kubernetes_stand_in.resources import Object, Resource


class ApiError(Exception):
    """`code` is the HTTP status, `reason` the machine-readable word beside it."""

    code = 500
    reason = "InternalError"

    def status(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }


class BadRequest(ApiError):
    code, reason = 400, "BadRequest"


class Unauthorized(ApiError):
    code, reason = 401, "Unauthorized"


class Forbidden(ApiError):
    code, reason = 403, "Forbidden"


class NotFound(ApiError):
    code, reason = 404, "NotFound"

    def __init__(self, plural: str, name: str) -> None:
        super().__init__(f'{plural} "{name}" not found')


class MethodNotAllowed(ApiError):
    code, reason = 405, "MethodNotAllowed"


class AlreadyExists(ApiError):
    code, reason = 409, "AlreadyExists"

    def __init__(self, resource: Resource, name: str) -> None:
        super().__init__(f'{resource.plural} "{name}" already exists')


class Conflict(ApiError):
    code, reason = 409, "Conflict"

    def __init__(self, resource: Resource, name: str, why: str) -> None:
        super().__init__(f'Operation cannot be fulfilled on {resource.plural} "{name}": {why}')


class Expired(ApiError):
    """A watch or list from a version that is no longer known."""

    code, reason = 410, "Expired"

    def __init__(self, asked: int, oldest: int) -> None:
        super().__init__(f"too old resource version: {asked} ({oldest})")


class UnsupportedMediaType(ApiError):
    code, reason = 415, "UnsupportedMediaType"


class Invalid(ApiError):
    code, reason = 422, "Invalid"

    def __init__(self, kind: str, name: str, why: str) -> None:
        super().__init__(f'{kind} "{name}" is invalid: {why}')


class TooManyRequests(ApiError):
    """An eviction that a disruption budget does not allow now."""

    code, reason = 429, "TooManyRequests"
