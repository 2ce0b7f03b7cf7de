"""Turns allowed sources into a tokenizer, packed token streams and the list of what was used."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tinypair.config import END_OF_TEXT, END_OF_TEXT_ID
from tinypair.licences import mentions_foreign_licence
from tinypair.sources import PROSE, Source, read_members

log = logging.getLogger(__name__)

MIN_CHARS, MAX_CHARS = 400, 150_000
MAX_SOURCE_BYTES = 30_000_000
HEADER_CHARS = 3000
TOKENIZER_SAMPLE_BYTES = 24_000_000
PROSE_REPEATS = 2
"""Documentation is a small part of the bytes but half of what the demo's prompts look like."""


@dataclass(frozen=True, slots=True)
class Document:
    source: int
    text: str
    prose: bool


def usable(text: str) -> bool:
    """Rejects generated tables, data files, minified text, and files that carry somebody else's licence."""
    if not MIN_CHARS <= len(text) <= MAX_CHARS or len(text) / (text.count("\n") + 1) > 120:
        return False
    digits = sum(text.count(d) for d in "0123456789")
    return digits <= 0.2 * len(text) and "\ufffd" not in text and not mentions_foreign_licence(text[:HEADER_CHARS])


def read_documents(sources: list[Source]) -> list[Document]:
    """All usable documents, each text once (compared without white space), at most `MAX_SOURCE_BYTES` a source."""
    tasks = [task for index, source in enumerate(sources) for task in _tasks(index, source)]
    seen: set[bytes] = set()
    sizes = [0] * len(sources)
    documents = []
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for part in pool.map(_read_task, tasks, chunksize=1):
            for document, digest in part:
                size = len(document.text.encode())
                if digest not in seen and sizes[document.source] + size <= MAX_SOURCE_BYTES:
                    seen.add(digest)
                    sizes[document.source] += size
                    documents.append(document)
    log.info("%d sources, %d documents, %.1f MB", len(sources), len(documents), sum(sizes) / 1e6)
    return documents


@dataclass(frozen=True, slots=True)
class _Task:
    source: int
    archive: Path | None
    paths: tuple[str, ...]
    readme: str


def _tasks(index: int, source: Source, size: int = 400) -> Iterator[_Task]:
    yield _Task(index, source.archive, source.paths[:size], source.readme)
    for start in range(size, len(source.paths), size):
        yield _Task(index, source.archive, source.paths[start : start + size], "")


def _read_task(task: _Task) -> list[tuple[Document, bytes]]:
    found = []
    pairs = _read_files(task.paths) if task.archive is None else read_members(task.archive, task.paths)
    texts = [("README.md", task.readme), *pairs] if task.readme else pairs
    for name, text in texts:
        if usable(text):
            digest = hashlib.blake2b("".join(text.split()).encode(), digest_size=8).digest()
            found.append((Document(task.source, text, PurePosixPath(name).suffix.lower() in PROSE), digest))
    return found


def _read_files(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    for path in map(Path, paths):
        if path.is_file() and path.stat().st_size <= 4 * MAX_CHARS:
            yield str(path), path.read_bytes().decode("utf-8", "replace")


def source_list(sources: list[Source], documents: list[Document]) -> str:
    """The JSON list shipped with the model: name, version, licence as declared, files and bytes used."""
    counts: dict[int, list[int]] = {}
    for document in documents:
        entry = counts.setdefault(document.source, [0, 0])
        entry[0] += 1
        entry[1] += len(document.text.encode())
    rows = [
        {
            "name": sources[i].name,
            "version": sources[i].version,
            "declared": sources[i].licence.text,
            "licences": list(sources[i].licence.families),
            "kind": sources[i].kind,
            "files": files,
            "bytes": size,
        }
        for i, (files, size) in counts.items()
    ]
    rows.sort(key=lambda row: str(row["name"]))
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def train_tokenizer(documents: list[Document], vocab: int) -> Tokenizer:
    """Byte-level BPE, so that any text can be encoded. Token 0 ends a text."""
    order = random.Random(1).sample(range(len(documents)), len(documents))
    sample, size = [], 0
    for i in order:
        sample.append(documents[i].text)
        size += len(documents[i].text)
        if size > TOKENIZER_SAMPLE_BYTES:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sample, trainer)
    if tokenizer.token_to_id(END_OF_TEXT) != END_OF_TEXT_ID:
        raise RuntimeError("the end-of-text token did not get id 0")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[npt.NDArray[np.uint16]]:
    """Token ids of each text, with the end-of-text token before it."""
    rows = []
    for start in range(0, len(texts), 4096):
        for item in tokenizer.encode_batch_fast(texts[start : start + 4096], add_special_tokens=False):
            rows.append(np.array([END_OF_TEXT_ID, *item.ids], dtype=np.uint16))
    return rows


def write_streams(folder: Path, tokenizer: Tokenizer, documents: list[Document], held_share: float = 0.01) -> None:
    """Writes `train.bin` and `val.bin`: uint16 tokens of shuffled documents, one after another."""
    shuffled = documents.copy()
    random.Random(0).shuffle(shuffled)
    cut = max(1, round(held_share * len(shuffled)))
    train = [d.text for d in shuffled[cut:] for _ in range(PROSE_REPEATS if d.prose else 1)]
    random.Random(2).shuffle(train)
    for name, texts in (("val", [d.text for d in shuffled[:cut]]), ("train", train)):
        stream = np.concatenate(encode(tokenizer, texts))
        stream.tofile(folder / f"{name}.bin")
        size = sum(len(t.encode()) for t in texts)
        log.info(
            "%s: %d documents, %.1f M tokens, %.2f bytes a token",
            name,
            len(texts),
            len(stream) / 1e6,
            size / len(stream),
        )
