"""Names what can go wrong with what is kept, each as the client gets it.

HttpError
  StoreUnavailable     503     the database does not answer, or not in time
  StoreFull            429     the tenant keeps as much as it may
"""

from __future__ import annotations

from http import HTTPStatus

from edge.http.errors import HttpError


class StoreUnavailable(HttpError):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "service_unavailable"
    default_code = "response_store_unavailable"
    default_retry_after_s = 2


class StoreFull(HttpError):
    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "insufficient_quota"
    default_code = "insufficient_quota"
    default_param = "store"
