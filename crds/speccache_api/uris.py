"""Model URIs: `builtin://NAME`, a model inside the runtime image, and `pvc://CLAIM/FOLDER`, one on a claim.

Their form is checked by the schema (fields.py); here they are taken apart, for everybody.
"""

from __future__ import annotations

BUILTIN_SCHEME = "builtin://"
CLAIM_SCHEME = "pvc://"


def builtin_name(uri: str) -> str | None:
    """The name of a built-in model; None for a model on a claim."""
    return uri.removeprefix(BUILTIN_SCHEME) if uri.startswith(BUILTIN_SCHEME) else None


def claim_and_folder(uri: str) -> tuple[str, str] | None:
    """(claim, folder in it) of a model on a claim, with folder "" for its root; None for a built-in model."""
    if not uri.startswith(CLAIM_SCHEME):
        return None
    claim, _, folder = uri.removeprefix(CLAIM_SCHEME).partition("/")
    return claim, folder
