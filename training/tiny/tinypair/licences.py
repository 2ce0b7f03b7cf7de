"""Decides whether a package's own metadata allow its text into the training data.

Only what the package declares counts, and only PSF, MIT, BSD and Apache-2.0. Whatever is unclear is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from email.message import Message

PSF, MIT, BSD, APACHE = "PSF", "MIT", "BSD", "Apache-2.0"
ALLOWED = frozenset({PSF, MIT, BSD, APACHE})

_IDENTIFIERS = {
    "psf-2.0": PSF,
    "mit": MIT,
    "bsd-2-clause": BSD,
    "bsd-3-clause": BSD,
    "apache-2.0": APACHE,
}
_FREE_FORM = {
    "psf": PSF,
    "psfl": PSF,
    "python software foundation license": PSF,
    "mit license": MIT,
    "the mit license": MIT,
    "bsd": BSD,
    "bsd license": BSD,
    "bsd-3": BSD,
    "bsd 3-clause": BSD,
    "bsd-3-clause license": BSD,
    "bsd 3-clause license": BSD,
    "bsd 3 clause": BSD,
    "3-clause bsd": BSD,
    "3-clause bsd license": BSD,
    "new bsd": BSD,
    "new bsd license": BSD,
    "modified bsd": BSD,
    "modified bsd license": BSD,
    "bsd-2-clause license": BSD,
    "simplified bsd": BSD,
    "apache": APACHE,
    "apache 2": APACHE,
    "apache 2.0": APACHE,
    "apache-2": APACHE,
    "apache 2.0 license": APACHE,
    "apache license 2.0": APACHE,
    "apache license": APACHE,
    "apache license, version 2.0": APACHE,
    "apache license version 2.0": APACHE,
    "apache software license": APACHE,
    "apache software license 2.0": APACHE,
}
_FOREIGN = re.compile(
    r"GNU (Lesser |Library |Affero )?(General )?Public|\b[AL]?GPL|Mozilla Public|\bMPL\b|LicenseRef|Creative Commons"
    r"|CC[- ]BY|Eclipse Public|proprietary|NVIDIA",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Declared:
    """What a package declares: its own words, and the families they belong to (all of `ALLOWED`)."""

    text: str
    families: tuple[str, ...]


def mentions_foreign_licence(text: str) -> bool:
    """True when the text names a licence outside the allowed families, as a header of a borrowed file would."""
    return _FOREIGN.search(text) is not None


def declared_licence(metadata: Message) -> Declared | None:
    """The licence of core metadata (METADATA or PKG-INFO), or None when any part of it is not plainly allowed."""
    expression = metadata.get("License-Expression")
    if expression:
        return _declared(expression, _expression_families(expression))
    classifiers = [c for c in metadata.get_all("Classifier", []) if c.startswith("License ::")]
    names = [c.rsplit("::", 1)[1].strip() for c in classifiers if c != "License :: OSI Approved"]
    families = [_family(name) for name in names]
    field = str(metadata.get("License") or "").strip()
    if len(field) > 100 or "\n" in field:
        if mentions_foreign_licence(field):
            return None
    elif field and field.upper() != "UNKNOWN":
        names.append(field)
        families += _expression_families(field) if _family(field) is None else [_family(field)]
    return _declared("; ".join(dict.fromkeys(names)), families)


def _declared(text: str, families: Iterable[str | None]) -> Declared | None:
    found = list(families)
    allowed = sorted({f for f in found if f is not None})
    return Declared(text, tuple(allowed)) if allowed and None not in found else None


def _expression_families(expression: str) -> list[str | None]:
    """Families of every identifier of an SPDX expression; None stands for one that is not allowed.

    A `WITH` exception changes the licence, so it is not allowed either.
    """
    words = re.sub(r"[()]", " ", expression).split()
    return [_IDENTIFIERS.get(word.lower()) for word in words if word.upper() not in {"AND", "OR"}]


def _family(name: str) -> str | None:
    key = re.sub(r"\s+", " ", name.lower().strip(" .\"'"))
    return _IDENTIFIERS.get(key) or _FREE_FORM.get(key)
