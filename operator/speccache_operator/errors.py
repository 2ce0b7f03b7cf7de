"""Everything the operator raises, in one tree, so that a caller can tell "later" from "never" without reading messages.

OperatorError
├── SettingsError            a wrong flag or environment variable: the process stops and names it
├── LeadershipLost           another process holds the Lease, or it could not be renewed in time: the process stops
└── ClusterError             a request to the API server had no good answer
    ├── Unavailable          no answer, a timeout, 429 or 5xx: the same request may work later
    └── ApiError             the server answered and refused
        ├── NotFound         404
        ├── Conflict         409: someone else wrote first, or the object is not the one we saw
        └── Refused          400, 403, 405, 413, 422: the same request will be refused again
"""


class OperatorError(Exception):
    """Root of the tree."""


class SettingsError(OperatorError):
    """A setting cannot be used; the message starts with its flag and environment variable."""


class LeadershipLost(OperatorError):
    """This process may no longer write."""


class ClusterError(OperatorError):
    """A request to the API server failed; the message says which request."""


class Unavailable(ClusterError):
    """Nothing is known about the outcome, or the server asks to come back later."""


class ApiError(ClusterError):
    """The server answered with an error status."""

    def __init__(self, status: int, message: str, request: str) -> None:
        super().__init__(f"{request}: {status} {message}")
        self.status = status
        self.message = message


class NotFound(ApiError):
    """The object, its namespace or its kind does not exist."""


class Conflict(ApiError):
    """The object changed, or is another one of the same name."""


class Refused(ApiError):
    """Schema, admission, quota or RBAC says no; repeating the request does not help until one of them changes."""
