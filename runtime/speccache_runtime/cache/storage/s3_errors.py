"""What went wrong with a bucket: one code for counting, one line that says what to do.

Nothing of what a server has written stands in the line but its error code and the name of a region: a message may hold
what was sent, and that includes keys and tokens.
"""

from __future__ import annotations

import http.client
import re
import ssl
from collections.abc import Iterator
from typing import Any

from botocore import exceptions

_BY_CODE = {
    "NoSuchBucket": "BucketNotFound",
    "AccessDenied": "AccessDenied",
    "AllAccessDisabled": "AccessDenied",
    "InvalidAccessKeyId": "AccessDenied",
    "InvalidToken": "AccessDenied",
    "SignatureDoesNotMatch": "AccessDenied",
    "XAdminUserNotFound": "AccessDenied",  # versitygw's word for an unknown access key
    "ExpiredToken": "CredentialsExpired",
    "ExpiredTokenException": "CredentialsExpired",
    "RequestExpired": "CredentialsExpired",
    "TokenRefreshRequired": "CredentialsExpired",
    "InvalidIdentityToken": "NoCredentials",
    "AuthorizationHeaderMalformed": "WrongRegion",
    "IllegalLocationConstraintException": "WrongRegion",
    "PermanentRedirect": "WrongRegion",
    "RequestTimeTooSkewed": "ClockSkew",
    "BandwidthLimitExceeded": "Throttled",
    "RequestLimitExceeded": "Throttled",
    "SlowDown": "Throttled",
    "ServiceUnavailable": "Throttled",
    "Throttling": "Throttled",
    "ThrottlingException": "Throttled",
    "TooManyRequests": "Throttled",
    "RequestTimeout": "Timeout",
    "NotImplemented": "Unsupported",
}

_BY_STATUS = {301: "WrongRegion", 307: "WrongRegion", 403: "AccessDenied", 429: "Throttled", 501: "Unsupported"}
_BY_STATUS |= {503: "Throttled"}

_BY_CLASS: tuple[tuple[type[BaseException], str], ...] = (
    (exceptions.NoCredentialsError, "NoCredentials"),
    (exceptions.PartialCredentialsError, "NoCredentials"),
    (exceptions.CredentialRetrievalError, "NoCredentials"),
    (exceptions.TokenRetrievalError, "NoCredentials"),
    (exceptions.NoAuthTokenError, "NoCredentials"),
    (exceptions.InvalidRegionError, "WrongRegion"),
    (exceptions.NoRegionError, "WrongRegion"),
    (ssl.SSLEOFError, "EndpointUnreachable"),
    (ssl.SSLZeroReturnError, "EndpointUnreachable"),
    (ssl.SSLError, "TlsFailed"),
    (exceptions.SSLError, "TlsFailed"),
    (exceptions.ConnectTimeoutError, "EndpointUnreachable"),
    (exceptions.ReadTimeoutError, "Timeout"),
    (TimeoutError, "Timeout"),
    (exceptions.ConnectionError, "EndpointUnreachable"),
    (exceptions.HTTPClientError, "EndpointUnreachable"),
    (http.client.HTTPException, "EndpointUnreachable"),
    (OSError, "EndpointUnreachable"),
)

_TEXTS = {
    "BucketNotFound": "does not exist: create it or correct the name",
    "AccessDenied": "refuses us ({detail}): check the keys, and that they may list the bucket and read, write and "
    "delete objects in it",
    "CredentialsExpired": "says that the credentials have expired: renew them; they are read again by themselves",
    "NoCredentials": "cannot be used without credentials, and there are none: name a credentialsSecret with "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod an identity",
    "EndpointUnreachable": "cannot be reached ({detail}): check the endpoint, its name and port, and that network "
    "policies let pods go there",
    "TlsFailed": "is not reached by a trusted connection ({detail}): check that the endpoint speaks TLS, and that "
    "caBundleConfigMap holds the authority that signed its certificate",
    "WrongRegion": "lies in {detail}: set region to that",
    "ClockSkew": "says that this machine's clock is wrong: set it right (15 minutes are tolerated)",
    "Throttled": "is throttled ({detail}): it gets more requests than it takes",
    "Timeout": "has not answered in time: check the server's load and the network",
    "ServerError": "has failed ({detail}): see the server's log",
    "Unsupported": "is kept by a server that lacks what is needed ({detail}): it must honour a put with If-None-Match",
}

_WORD = re.compile(r"[A-Za-z0-9.]{1,64}")
_REGION = re.compile(r"[a-z0-9-]{1,64}")


def explain(error: BaseException) -> tuple[str, str]:
    """The code, and what is wrong and what to do: a text to follow the name of the bucket."""
    if isinstance(error, exceptions.ClientError):
        code, detail = _of_answer(error.response)
    else:
        code, detail = _of_exception(error)
    return code, _text(code, detail)


def error_code(error: exceptions.ClientError) -> str:
    """The server's own code; the status in digits where there was no text to the answer (to HEAD)."""
    return error.response.get("Error", {}).get("Code") or ""


def explain_code(server_code: str) -> tuple[str, str]:
    """The same where there is no exception: one object of many failed."""
    code, detail = _of_answer({"Error": {"Code": server_code}})
    return code, _text(code, detail)


def _text(code: str, detail: str) -> str:
    return _TEXTS.get(code, "answers {detail}: see the server's documentation").format(detail=detail)


def _of_answer(response: Any) -> tuple[str, str]:
    error, metadata = response.get("Error", {}), response.get("ResponseMetadata", {})
    word, status = error.get("Code") or "", metadata.get("HTTPStatusCode") or 0
    if word.isdecimal():
        word, status = "", int(word)
    if not _WORD.fullmatch(word):
        word = ""
    detail = word or f"status {status}"
    code = _BY_CODE.get(word) or _BY_STATUS.get(status) or ("ServerError" if status >= 500 else word or f"Http{status}")
    if code == "WrongRegion":
        detail = _region(error, metadata)
    return code, detail


def _region(error: Any, metadata: Any) -> str:
    told = error.get("Region") or metadata.get("HTTPHeaders", {}).get("x-amz-bucket-region") or ""
    return f"region {told}" if _REGION.fullmatch(told) else "another region, which the server does not name"


def _of_exception(error: BaseException) -> tuple[str, str]:
    causes = list(_causes(error))
    # A timeout or a refused certificate may be wrapped in an error that only says that a connection was lost.
    for inner in (*causes[1:], error) if isinstance(error, exceptions.HTTPClientError) else causes:
        for kind, code in _BY_CLASS:
            if isinstance(inner, kind):
                return code, _detail(causes)
    return type(error).__name__, type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was made of."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        inner = waiting.pop(0)
        if any(inner is other for other in seen):
            continue
        seen.append(inner)
        yield inner
        wrapped = [inner.__cause__, inner.__context__, *inner.args]
        if isinstance(inner, exceptions.BotoCoreError):
            wrapped.append(inner.kwargs.get("error"))
        waiting += [other for other in wrapped if isinstance(other, BaseException)]


def _detail(causes: list[BaseException]) -> str:
    """What the system or OpenSSL says, in its own words: these know nothing of the request."""
    for inner in causes:
        if isinstance(inner, ssl.SSLError) and inner.reason:
            told = getattr(inner, "verify_message", "") or inner.reason.replace("_", " ").lower()
            return str(told)
    for inner in causes:
        if isinstance(inner, OSError) and inner.strerror and not isinstance(inner, ssl.SSLError):
            return inner.strerror
    lost = (exceptions.ConnectionClosedError, http.client.HTTPException)
    return "the connection was lost" if isinstance(causes[0], lost) else "no connection"
