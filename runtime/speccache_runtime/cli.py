"""The command line. What it imports at the top is light, so that `--help` and a typing error are answered at once.

Exit codes: 0 done; 1 `inspect` could not read the models, `check-storage` or `empty-storage` could not use the storage,
or a bug (with a traceback); 2 a wrong command line, configuration, model or storage directory (one line on standard
error); 130 stopped at once; 143 ended by SIGTERM, which `serve` takes as the order to end and answers with 0.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from speccache_api import drafts
from speccache_runtime.errors import ConfigError, EngineFailed, SpecCacheError

EXIT_FAILED = 1
EXIT_WRONG = 2
EXIT_INTERRUPTED = 130

TERMINATION_LOG = Path("/dev/termination-log")
"""Where Kubernetes reads a container's last message. Its length limit is the reason for a short inspection."""

_MAIN_HELP = """\
Serve a language model with its draft, and keep both halves of its KV cache together.

examples:
  speccache-runtime serve -f samples/tiny.yaml           serve a resource on this machine, without a cluster
  speccache-runtime bench restart -f samples/tiny.yaml   what a restart costs, with and without the draft's half
  speccache-runtime inspect --target DIR --draft DIR     what must be known of two models to size their pod
"""

_SERVE_HELP = """\
Serve one model over OpenAI's HTTP API until SIGTERM or Ctrl-C, then drain: finish running requests, write cached pages
to storage, exit 0. A second signal ends the process at once. When the engine fails every request gets an error and the
exit code is 1.

examples:
  speccache-runtime serve -f samples/tiny.yaml
      the built-in model; its storage tier lies under ~/.cache/speccache/serve/NAMESPACE/NAME
  speccache-runtime serve -f chat.yaml --claim models=/data/models --storage-dir /data/kv --port 9000
      a resource whose model is pvc://models/...: /data/models stands for the claim
  AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... speccache-runtime serve -f samples/tiny-s3.yaml
      a resource whose storage tier is a bucket: its Secret is in a cluster, so the environment has the keys
  speccache-runtime serve --wire /etc/speccache/wire.json
      what a pod runs: the document that the operator has written
"""

_INSPECT_HELP = """\
Read the sizes and identities of a target and its draft from their files, and print them as JSON.

examples:
  speccache-runtime inspect --target /data/llama --draft /data/eagle3-llama
  speccache-runtime inspect --target /data/llama --draft /data/llama-small --algorithm Standalone
  speccache-runtime inspect --target /models/target --draft /models/draft --termination-message
      what the inspection Job runs: the JSON, or the one line of an error, becomes the pod's last message
  speccache-runtime inspect --builtin > crds/speccache_api/builtin.json
      the table of packaged models, from which the operator sizes builtin:// without a Job
"""

_CHECK_HELP = """\
Try a place where pages are to be stored: list, write, read and delete there. Prints one line of JSON: {"ok": true}, or
{"ok": false, "code": CODE, "message": TEXT}, with exit code 1.

examples:
  speccache-runtime check-storage --target '{"kind": "Volume", "claim": null, "path": "/data/kv"}'
  speccache-runtime check-storage --target "$TARGET" --termination-message
      what the operator's Job runs before any pod serves from a bucket; the line becomes the pod's last message
"""

_EMPTY_HELP = """\
Remove all pages that are stored below one fingerprint (status.fingerprint of the resource), and nothing else.

examples:
  speccache-runtime empty-storage --target "$TARGET" --fingerprint "$FINGERPRINT"
  speccache-runtime empty-storage --target "$TARGET" --fingerprint "$FINGERPRINT" --termination-message
      what the operator's Job runs when a resource with retention Delete is gone
"""

_BENCH_HELP = """\
Measure on this machine.

examples:
  speccache-runtime bench restart -f samples/tiny.yaml   what a restart costs, with and without the draft's half
  speccache-runtime bench gpu --directory /tmp/pair      step times of an 8B-shaped pair on a GPU
  speccache-runtime bench storage --directory /data/kv   how fast pages come to storage and back
"""

_RESTART_HELP = """\
Start a server, send it prompts, restart it on the same storage and send them again; then once more with the draft's
half of every stored page withheld (if the draft keeps KV), and once without speculation. Prints what came from the
cache, latencies and accept lengths.

examples:
  speccache-runtime bench restart -f samples/tiny.yaml
  speccache-runtime bench restart -f samples/tiny.yaml --algorithm NGram
  speccache-runtime bench restart -f samples/tiny.yaml --json > restart.json
"""

_GPU_HELP = """\
Make an 8B-shaped target and an EAGLE-3 head with made-up weights, and measure on one GPU: time to first token cold,
from the device tier and from the host tier; target, verify and draft steps; page moves, beside what the machine gives.
Prints JSON. Made-up weights say nothing about accept length.

examples:
  speccache-runtime bench gpu --directory /tmp/pair > gpu.json
"""


_STORAGE_HELP = """\
Write pages to a directory or a bucket and read them back, by SpecCache's backend and by the plainest ways that the
place and the library offer, in turns: GB/s and CPU seconds per GB. What is written is removed. Credentials for a bucket
come from the environment, as every S3 client takes them.

examples:
  speccache-runtime bench storage --directory /data/kv
  speccache-runtime bench storage --bucket kv --endpoint http://127.0.0.1:7070 --path-style --threads 16
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except SpecCacheError as error:
        sys.stderr.write(f"speccache-runtime: {_one_line(error)}\n")
        return EXIT_FAILED if isinstance(error, EngineFailed) else EXIT_WRONG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Answers a wrong command line with the examples of its help."""

    def error(self, message: str) -> NoReturn:
        _, word, examples = (self.description or "").partition("examples:\n")
        self.print_usage(sys.stderr)
        self.exit(EXIT_WRONG, f"{self.prog}: error: {message}\n" + (f"\n{word}{examples}" if examples else ""))


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        sys.stdout.write(f"{parser.prog} {version('speccache')}\n")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("speccache-runtime", description=_MAIN_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_inspect(commands)
    _add_check_storage(commands)
    _add_empty_storage(commands)
    _add_bench(commands)
    return parser


if TYPE_CHECKING:
    _Commands: TypeAlias = argparse._SubParsersAction[_Parser]


def _add(commands: _Commands, name: str, summary: str, text: str) -> _Parser:
    return commands.add_parser(
        name, help=summary, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _add_serve(commands: _Commands) -> None:
    parser = _add(commands, "serve", "serve a model over HTTP", _SERVE_HELP)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "-f", "--filename", type=Path, metavar="RESOURCE", help="YAML file with one SpecCacheDeployment"
    )
    source.add_argument("--wire", type=Path, metavar="FILE", help="wire document, as the operator writes it")
    _add_local_options(parser)
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1 with -f, all with --wire)")
    parser.add_argument("--port", type=_port, help="port to listen on, 0 for a free one (default: 8000)")
    parser.set_defaults(command=_serve)


def _add_local_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--storage-dir", type=Path, metavar="DIR", help="directory of the storage tier, with -f")
    parser.add_argument(
        "--claim",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="directory of a pvc:// claim, with -f; repeatable",
    )


def _add_inspect(commands: _Commands) -> None:
    parser = _add(commands, "inspect", "read what a pod must know of its models", _INSPECT_HELP)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--target", metavar="DIR", help="directory of the target model, or its builtin:// URI")
    source.add_argument("--builtin", action="store_true", help="inspect the packaged models")
    parser.add_argument("--draft", metavar="DIR", help="directory of the draft model, or its builtin:// URI")
    parser.add_argument(
        "--algorithm",
        choices=drafts.names(lambda draft: draft.model),
        default="EAGLE3",
        help="what the draft is for (default: EAGLE3)",
    )
    _add_termination_message(parser)
    parser.set_defaults(command=_inspect)


def _add_check_storage(commands: _Commands) -> None:
    parser = _add(commands, "check-storage", "try a place for pages", _CHECK_HELP)
    _add_target(parser)
    parser.set_defaults(command=_check_storage)


def _add_empty_storage(commands: _Commands) -> None:
    parser = _add(commands, "empty-storage", "remove the pages of one model", _EMPTY_HELP)
    _add_target(parser)
    parser.add_argument("--fingerprint", required=True, metavar="HEX", help="below which the pages lie")
    parser.set_defaults(command=_empty_storage)


def _add_target(parser: _Parser) -> None:
    parser.add_argument("--target", required=True, metavar="JSON", help="where, as in a wire document")
    _add_termination_message(parser)


def _add_termination_message(parser: _Parser) -> None:
    parser.add_argument(
        "--termination-message",
        type=Path,
        nargs="?",
        const=TERMINATION_LOG,
        metavar="FILE",
        help=f"write the result, or the error, to FILE (default: {TERMINATION_LOG})",
    )


def _add_bench(commands: _Commands) -> None:
    bench = _add(commands, "bench", "measure", _BENCH_HELP)
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    _add_bench_restart(kinds)
    _add_bench_gpu(kinds)
    _add_bench_storage(kinds)


def _add_bench_restart(kinds: _Commands) -> None:
    parser = _add(kinds, "restart", "what a restart costs, with and without the draft's half", _RESTART_HELP)
    parser.add_argument("-f", "--filename", type=Path, required=True, metavar="RESOURCE", help="as for serve")
    parser.add_argument(
        "--algorithm",
        choices=drafts.names(),
        help="in place of the resource's own, with a built-in draft if it needs one",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--new-tokens", type=_positive, default=64, metavar="N", help="tokens per prompt (default: 64)")
    _add_local_options(parser)
    parser.set_defaults(command=_bench_restart)


def _add_bench_gpu(kinds: _Commands) -> None:
    parser = _add(kinds, "gpu", "time to first token and step times of an 8B-shaped pair on a GPU", _GPU_HELP)
    parser.add_argument("--directory", type=Path, required=True, metavar="DIR", help="where 17 GB of weights are made")
    parser.add_argument(
        "--prompt-tokens", type=_positive, default=30000, metavar="N", help="length of the prompt (default: 30000)"
    )
    parser.set_defaults(command=_bench_gpu)


def _add_bench_storage(kinds: _Commands) -> None:
    parser = _add(kinds, "storage", "how fast pages come to storage and back", _STORAGE_HELP)
    parser.add_argument("--directory", type=Path, metavar="DIR", help="an existing directory on the volume")
    parser.add_argument("--bucket", metavar="NAME", help="an existing bucket")
    parser.add_argument("--prefix", default="", metavar="PATH", help="where in the bucket (default: at its top)")
    parser.add_argument("--endpoint", metavar="URL", help="of the bucket's server (default: the public one of AWS)")
    parser.add_argument("--region", metavar="NAME", help="of the bucket (default: that of the environment)")
    parser.add_argument("--path-style", action="store_true", help="the bucket has no host name of its own")
    parser.add_argument("--threads", type=_positive, default=8, metavar="N", help="at the same time (default: 8)")
    parser.add_argument("--rounds", type=_positive, default=5, metavar="N", help="turns of each way (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(command=_bench_storage)


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _serve(arguments: argparse.Namespace) -> int:
    from speccache_runtime.server.command import serve_resource, serve_wire

    if arguments.wire is not None:
        if arguments.storage_dir is not None or arguments.claim:
            raise ConfigError("--storage-dir and --claim go with -f; a wire document has its directories in it")
        serve_wire(arguments.wire, arguments.host, arguments.port)
    else:
        serve_resource(arguments.filename, arguments.claim, arguments.storage_dir, arguments.host, arguments.port)
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from speccache_runtime.inspection import builtin_table, inspect_pair

    if arguments.builtin and (arguments.draft is not None or arguments.termination_message is not None):
        raise ConfigError("--builtin takes neither --draft nor --termination-message")
    code = 0
    try:
        if arguments.builtin:
            text = builtin_table()
        else:
            text = inspect_pair(arguments.target, arguments.draft, arguments.algorithm)
    except SpecCacheError as error:
        code, text = EXIT_FAILED, f"{_one_line(error)}\n"
        sys.stderr.write(f"speccache-runtime: {text}")
    _answer(arguments, code, text)
    return code


def _check_storage(arguments: argparse.Namespace) -> int:
    from speccache_runtime.upkeep import check, read_target

    usable, text = check(read_target(arguments.target))
    if arguments.termination_message is not None:
        _write(arguments.termination_message, text)
    sys.stdout.write(text)
    return 0 if usable else EXIT_FAILED


def _empty_storage(arguments: argparse.Namespace) -> int:
    from speccache_runtime.upkeep import empty, read_target

    code, target = 0, read_target(arguments.target)
    try:
        removed = empty(target, arguments.fingerprint)
        text = f"removed {removed} objects from {target.place} below {arguments.fingerprint}\n"
    except SpecCacheError as error:
        code, text = EXIT_FAILED, f"{_one_line(error)}\n"
        sys.stderr.write(f"speccache-runtime: {text}")
    _answer(arguments, code, text)
    return code


def _answer(arguments: argparse.Namespace, code: int, text: str) -> None:
    """Where it is wanted: as the pod's last message, or on standard output if it is no error."""
    if arguments.termination_message is not None:
        _write(arguments.termination_message, text)
    elif code == 0:
        sys.stdout.write(text)


def _bench_restart(arguments: argparse.Namespace) -> int:
    from speccache_runtime.bench.restart import run_restart_bench

    # Ended from outside, the benchmark must still end the server that it started: leave by an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = run_restart_bench(
        arguments.filename, arguments.claim, arguments.storage_dir, arguments.new_tokens, arguments.algorithm
    )
    sys.stdout.write(report.to_json() if arguments.json else report.to_text())
    return 0


def _bench_gpu(arguments: argparse.Namespace) -> int:
    import json

    from speccache_runtime.bench.gpu import GpuBench
    from speccache_runtime.bench.random_pair import LLAMA_8B

    bench = GpuBench(LLAMA_8B, arguments.directory, arguments.prompt_tokens)
    tables = bench.run(lambda text: sys.stderr.write(f"{text} …\n"))
    sys.stdout.write(json.dumps(tables, indent=1) + "\n")
    return 0


def _bench_storage(arguments: argparse.Namespace) -> int:
    from speccache_api.storage_target import BucketTarget
    from speccache_runtime.bench.storage import run_storage_bench, to_json

    target = None
    if arguments.bucket is not None:
        target = BucketTarget(
            bucket=arguments.bucket,
            prefix=arguments.prefix.strip("/"),
            endpoint=arguments.endpoint,
            region=arguments.region,
            force_path_style=arguments.path_style,
            credentials_secret=None,
            ca_bundle_config_map=None,
            service_account=None,
        )
    tables = run_storage_bench(arguments.directory, target, arguments.threads, arguments.rounds)
    sys.stdout.write(to_json(tables) if arguments.json else "\n".join(table.to_text() for table in tables))
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
