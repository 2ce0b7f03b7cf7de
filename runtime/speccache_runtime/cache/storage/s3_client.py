"""The client of one bucket: how it connects, how long it waits, and by which credentials it signs."""

from __future__ import annotations

import os
import ssl
import threading
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.credentials import CredentialProvider, CredentialResolver, Credentials, ReadOnlyCredentials
from botocore.exceptions import EndpointConnectionError, NoCredentialsError

from speccache_runtime.cache.storage.s3_body import Upload

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from speccache_api.storage_target import BucketTarget

CONNECTIONS = 64
"""The most connections, and so requests, at once."""

CONNECT_S = 2.0
ANSWER_S = 6.0
"""The longest wait for the first byte of an answer, and for the next one."""

ATTEMPTS = 3
"""By botocore's "standard" mode: with random pauses of at most 1 and 2 seconds. So an operation whose every attempt
hangs ends within (2 + 6) * 3 + 3 = 27 s."""

ASK_BEFORE_BYTES = 1 << 20
"""A put of so much waits for the server's word before it sends the body, which may be refused. For less, the round trip
costs more than a body sent for nothing."""

RENEW_S = 5.0
"""Identities that were refused are not looked up again more often than this."""

_RENEWED_AFTER = frozenset({"NoCredentials", "CredentialsExpired"})
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class FileCredentials(Credentials):
    """Keys in files, as a mounted Secret has them: read again when they have changed, so that they can be replaced
    under a running pod."""

    def __init__(self, folder: Path) -> None:
        super().__init__("", "", method="speccache-secret")
        self._folder = folder
        self._lock = threading.Lock()
        self._seen: list[tuple[int, int] | None] | None = None

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """What botocore signs a request with. Raises NoCredentialsError without the two files that must be there."""
        with self._lock:
            while (now := self._state()) != self._seen:  # again if they change while they are read
                self.access_key, self.secret_key, self.token = map(self._read, _KEYS)
                self._seen = now
            if not (self.access_key and self.secret_key):
                raise NoCredentialsError
            return ReadOnlyCredentials(self.access_key, self.secret_key, self.token or None)

    def _state(self) -> list[tuple[int, int] | None]:
        """Changes whenever a file does."""
        found: list[tuple[int, int] | None] = []
        for key in _KEYS:
            try:
                status = os.stat(self._folder / key)
                found.append((status.st_ino, status.st_mtime_ns))
            except OSError:
                found.append(None)
        return found

    def _read(self, key: str) -> str:
        try:
            return (self._folder / key).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""


class _SecretProvider(CredentialProvider):
    METHOD = "speccache-secret"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._found = FileCredentials(folder)

    def load(self) -> Credentials:
        return self._found


class Link:
    """Makes the client when it is first needed, and anew when its identity has to be looked up again. Thread-safe."""

    def __init__(self, target: BucketTarget, credentials: Path, ca_bundle: Path) -> None:
        self._target = target
        self._credentials = credentials
        self._ca_bundle = ca_bundle
        self._lock = threading.Lock()
        self._client: S3Client | None = None
        self._made_at = 0.0
        self._clock_offset = time.time() - time.monotonic()

    def client(self) -> S3Client:
        """The client; many threads may use it at once."""
        with self._lock:
            if self._client is None:
                self._client = self._make()
                self._made_at = time.monotonic()
            return self._client

    def failed(self, code: str) -> None:
        """Look the identity up again, if that may help. Keys in files need no such thing."""
        with self._lock:
            if code in _RENEWED_AFTER and self._client and time.monotonic() - self._made_at >= RENEW_S:
                self._drop()

    def now(self) -> float:
        """The server's clock, by the Date of its last answer."""
        return time.monotonic() + self._clock_offset

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def _make(self) -> S3Client:
        target = self._target
        session = botocore.session.Session()
        if target.credentials_secret is not None:
            resolver = CredentialResolver([_SecretProvider(self._credentials)])
            session.register_component("credential_provider", resolver)
        config = Config(
            connect_timeout=CONNECT_S,
            read_timeout=ANSWER_S,
            max_pool_connections=CONNECTIONS,
            tcp_keepalive=True,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            # An object carries its own checksums, made where the page was; theirs would cover less of its way.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={
                "addressing_style": "path" if target.force_path_style else "auto",
                # SHA-256 of every page costs more than sending it. TLS does the same; without TLS, whoever can change
                # what we write can change what we read, which nobody signs.
                "payload_signing_enabled": False,
            },
        )
        try:
            client: S3Client = boto3.Session(botocore_session=session).client(
                "s3",
                endpoint_url=target.endpoint,
                region_name=target.region,
                verify=self._authorities(session),
                config=config,
            )
        except ValueError as error:
            raise EndpointConnectionError(endpoint_url=target.endpoint or "", error=error) from error
        client.meta.events.register("after-call.s3", self._answered)
        client.meta.events.register_first("needs-retry.s3", _stay_in_the_region)
        client.meta.events.register_last("before-call.s3", _ask_only_before_much)
        return client

    def _authorities(self, session: botocore.session.Session) -> str | None:
        """File of the authorities that certificates are checked by. Read at each connection, so it can be replaced."""
        if self._target.ca_bundle_config_map is not None:
            return str(self._ca_bundle)
        if session.get_config_variable("ca_bundle"):
            return None  # botocore takes that: AWS_CA_BUNDLE
        return ssl.get_default_verify_paths().cafile  # botocore's own list knows nothing of this system's

    def _answered(self, parsed: dict[str, Any], **_: object) -> None:
        """Every answer tells the time, cut to whole seconds."""
        date = parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        if date:
            try:
                self._clock_offset = parsedate_to_datetime(date).timestamp() + 0.5 - time.monotonic()
            except ValueError:
                return


def _stay_in_the_region(request_dict: dict[str, Any], **_: object) -> None:
    """Keeps botocore from following a bucket into its region, which costs requests and traffic that nobody sees, and
    from asking for ever where a server redirects without naming a region. The error tells the region."""
    request_dict["context"].setdefault("s3_redirect", {})["redirected"] = True


def _ask_only_before_much(params: dict[str, Any], **_: object) -> None:
    """botocore asks before every body. That is done for the same event as this, so this comes last."""
    body = params.get("body")
    if isinstance(body, Upload) and len(body) < ASK_BEFORE_BYTES:
        params["headers"].pop("Expect", None)
