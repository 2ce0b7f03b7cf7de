"""Makes `prompts.jsonl` from the project's own text: python -m speccache_runtime.bench.make_prompts REPOSITORY

Run it only to replace the benchmark: other prompts give other numbers. The sources change over time, the prompts are
checked in and stay. Lengths are counted with the built-in model's tokenizer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from speccache_runtime.bench.prompts import PROMPTS_FILE
from speccache_runtime.config import builtin_directory
from speccache_runtime.model.tokenizer import Tokenizer

PASSAGES = "passages.md"
NATURAL_TOKENS = 1000
COPY_TOKENS = 700
QUOTED_TOKENS = 299
SEPARATOR = "\n\n# ---- the same again ----\n\n"

NATURAL_SOURCES = (
    "runtime/speccache_runtime/cache/paired.py",
    "runtime/speccache_runtime/engine/engine.py",
    "operator/speccache_operator/plan.py",
    "crds/speccache_api/spec.py",
    "runtime/speccache_runtime/cache/storage/file.py",
    "operator/speccache_operator/cluster.py",
)
"""With the passages they make the natural prompts."""

COPY_SOURCES = (
    "runtime/speccache_runtime/cache/index.py",
    "runtime/speccache_runtime/cache/prefetch.py",
    "runtime/speccache_runtime/cache/storage/codec.py",
    "runtime/speccache_runtime/cache/storage/store.py",
    "runtime/speccache_runtime/cache/writeback.py",
    "runtime/speccache_runtime/model/target.py",
    "runtime/speccache_runtime/scheduling/scheduler.py",
    "operator/speccache_operator/leader.py",
    "operator/speccache_operator/rollout.py",
    "operator/speccache_operator/inspection.py",
    "crds/speccache_api/sizing.py",
    "crds/speccache_api/wire.py",
)


def main(repository: Path) -> None:
    """Write the prompts beside this module."""
    tokenizer = Tokenizer.from_dir(builtin_directory("tiny", "target"))
    here = Path(__file__).parent
    passages = ["# " + part for part in (here / PASSAGES).read_text(encoding="utf-8").removeprefix("# ").split("\n# ")]
    natural = passages + [(repository / source).read_text(encoding="utf-8") for source in NATURAL_SOURCES]
    copied = [(repository / source).read_text(encoding="utf-8") for source in COPY_SOURCES]
    lines = [
        *_numbered("natural", (_start(tokenizer, text, NATURAL_TOKENS) for text in natural)),
        *_numbered("copy", (_copy(tokenizer, text) for text in copied)),
    ]
    (here / PROMPTS_FILE).write_text("".join(lines), encoding="utf-8")


def _numbered(kind: str, texts: Iterator[str]) -> Iterator[str]:
    for number, text in enumerate(texts, start=1):
        yield json.dumps({"name": f"{kind}-{number:02}", "kind": kind, "text": text}, ensure_ascii=False) + "\n"


def _copy(tokenizer: Tokenizer, text: str) -> str:
    source = _start(tokenizer, text, COPY_TOKENS)
    return source + SEPARATOR + _start(tokenizer, source, QUOTED_TOKENS)


def _start(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """The beginning of `text` that has `tokens` tokens (or all of it)."""
    detokenizer = tokenizer.detokenizer()
    return detokenizer.push(tokenizer.encode(text)[:tokens])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
