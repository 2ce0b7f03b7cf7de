"""Command line: `pack`, `data`, `warm-up` (fills the compiler's cache meanwhile), `train` and `evaluate`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinypair import corpus, evaluate, files, sources, train
from tinypair.config import END_OF_TEXT_ID, HEAD_SCHEDULE, TARGET_SCHEDULE, PairShape, Unroll
from tinypair.rows import RowMaker
from tinypair.speculate import DraftKV

log = logging.getLogger("tinypair")

SEPARATORS = ("", "\n", "\n\n", "\n\n\n", "\n---\n", "\n\n---\n\n", "\n\n\n\n", " ", ":\n\n", "\nAgain:\n")


def main() -> int:
    args = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="[%(relativeCreated)7.0f ms] %(message)s", stream=sys.stdout)
    torch.set_num_threads(min(torch.get_num_threads(), args.threads))
    return int(args.run(args) or 0)


def make_data(args: argparse.Namespace) -> None:
    """Collects allowed text; writes the tokenizer, the token streams and the list of sources into `--work`."""
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    held = {s.name for s in sources.package_archives(Path(args.held_out))} if args.held_out else set()
    found = [sources.standard_library(), *sources.installed_packages()]
    if args.archives:
        found += sources.package_archives(Path(args.archives))
    found = [s for s in found if s.name not in held]
    documents = corpus.read_documents(found)
    (work / "SOURCES.json").write_text(corpus.source_list(found, documents))
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(args.tokenizer)
    else:
        tokenizer = corpus.train_tokenizer(documents, PairShape().vocab)
    tokenizer.save(str(work / "tokenizer.json"))
    corpus.write_streams(work, tokenizer, documents)


def pack_archives(args: argparse.Namespace) -> None:
    """Shrinks the package archives of a folder to their text, to carry them to a machine without a network."""
    folder = Path(args.to)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(Path(args.archives).iterdir()):
        packed = sources.pack(path, folder)
        log.info("%s: %.1f MB", packed.name, packed.stat().st_size / 1e6)


def train_pair(args: argparse.Namespace) -> None:
    """Trains the target, then the head, and writes both (and what the loops did) into `--out`."""
    work, out, device, shape = Path(args.work), Path(args.out), _device(), PairShape()
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    stream, held = _stream(work / "train.bin", device), _stream(work / "val.bin", device)
    start = files.load_pair(Path(args.start), device) if args.start else (None, None)
    target_schedule = replace(TARGET_SCHEDULE, seconds=args.target_seconds, **_overrides(args, "target"))
    separators = _separators(tokenizer)
    target, target_run = train.train_target(shape, RowMaker(stream, separators, seed=1), target_schedule, start[0])
    loss = train.held_out_loss(target, held)
    log.info("loss on held-out files: %.4f", loss)
    files.save_tokenizer(out / "target", tokenizer, shape)
    files.save_target(out / "target", target)
    kept, covered = train.draft_vocabulary(stream, shape)
    head_schedule = replace(HEAD_SCHEDULE, seconds=args.head_seconds, **_overrides(args, "head"))
    maker = RowMaker(stream, separators, seed=4)
    head, head_run = train.train_head(target, kept, maker, head_schedule, Unroll(), start[1])
    files.save_head(out / "draft", head)
    report = {
        "train_tokens": stream.numel(),
        "target": asdict(target_schedule) | asdict(target_run) | {"held_out_loss": loss},
        "head": asdict(head_schedule) | asdict(head_run) | {"draft_vocabulary_covers": covered},
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")


def evaluate_pair(args: argparse.Namespace) -> None:
    """Accept lengths of the pair in `--out` on held-out packages (`--held-out`) or files (`--files`)."""
    out, device = Path(args.out), _device()
    tokenizer = Tokenizer.from_file(str(out / "target/tokenizer.json"))
    target, head = files.load_pair(out, device)
    if args.files:
        documents = evaluate.text_file_documents(Path(args.files))
    else:
        documents = evaluate.held_out_documents(Path(args.held_out))
    sets = evaluate.prompt_sets(tokenizer, documents, args.prompts)
    how = evaluate.Measurement(args.new_tokens, args.steps, tuple(args.pages), tuple(map(DraftKV, args.kinds)))
    results = []
    for name in args.sets.split(","):
        results += evaluate.measure(target, head, name, sets[name].to(device), how)
        if args.report:
            Path(args.report).write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")


def warm_up(args: argparse.Namespace) -> None:
    """Trains a second on made-up tokens, so that the real training finds compiled code."""
    device, shape = _device(), PairShape()
    stream = torch.randint(0, shape.vocab, (1_000_000,), dtype=torch.int16, device=device)
    maker = RowMaker(stream, [[]], seed=0)
    target, _ = train.train_target(shape, maker, replace(TARGET_SCHEDULE, seconds=1))
    kept = torch.arange(shape.draft_vocab, device=device)
    train.train_head(target, kept, maker, replace(HEAD_SCHEDULE, seconds=1), Unroll())


def _separators(tokenizer: Tokenizer) -> list[list[int]]:
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in SEPARATORS]
    return [*texts, [END_OF_TEXT_ID], [END_OF_TEXT_ID]]


def _overrides(args: argparse.Namespace, which: str) -> dict[str, Any]:
    names = ("learning_rate", "copy_from", "copy_share")
    given = {name: getattr(args, f"{which}_{name}") for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _stream(path: Path, device: torch.device) -> Tensor:
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int16)).to(device)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tinypair", description=__doc__)
    parser.add_argument("--threads", type=int, default=16)
    commands = parser.add_subparsers(required=True)

    data = commands.add_parser("data", help=make_data.__doc__)
    data.add_argument("--work", required=True)
    data.add_argument("--archives", help="folder of wheels and source archives to read too")
    data.add_argument("--held-out", help="folder of archives whose packages must stay out")
    data.add_argument("--tokenizer", help="use this tokenizer.json instead of training one")
    data.set_defaults(run=make_data)

    packing = commands.add_parser("pack", help=pack_archives.__doc__)
    packing.add_argument("--archives", required=True)
    packing.add_argument("--to", required=True)
    packing.set_defaults(run=pack_archives)

    training = commands.add_parser("train", help=train_pair.__doc__)
    training.add_argument("--work", required=True)
    training.add_argument("--out", required=True)
    training.add_argument("--start", help="go on with the pair in this folder")
    training.add_argument("--target-seconds", type=float, default=TARGET_SCHEDULE.seconds)
    training.add_argument("--head-seconds", type=float, default=HEAD_SCHEDULE.seconds)
    for which in ("target", "head"):
        for name in ("learning-rate", "copy-from", "copy-share"):
            training.add_argument(f"--{which}-{name}", type=float)
    training.set_defaults(run=train_pair)

    evaluation = commands.add_parser("evaluate", help=evaluate_pair.__doc__)
    evaluation.add_argument("--out", required=True)
    source = evaluation.add_mutually_exclusive_group(required=True)
    source.add_argument("--held-out", help="folder of package archives")
    source.add_argument("--files", help="folder of text files")
    evaluation.add_argument("--sets", default="copy,copy_text,natural")
    evaluation.add_argument("--prompts", type=int, default=32)
    evaluation.add_argument("--new-tokens", type=int, default=200)
    evaluation.add_argument("--steps", type=int, default=7)
    evaluation.add_argument("--pages", type=int, nargs="+", default=[16])
    evaluation.add_argument("--kinds", nargs="+", choices=list(DraftKV), default=list(DraftKV))
    evaluation.add_argument("--report")
    evaluation.set_defaults(run=evaluate_pair)

    commands.add_parser("warm-up", help=warm_up.__doc__).set_defaults(run=warm_up)
    return parser


if __name__ == "__main__":
    sys.exit(main())
