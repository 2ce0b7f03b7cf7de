"""`make demo`: what SpecCache is for, shown on a cluster in three runs of the same prompts.

up      install the charts, serve samples/tiny.yaml, measure it cold, after the loss of its pod, and after the loss of
        the draft's half of its stored pages; print the table, and how to talk to the model
down    take everything off again; the cluster too, unless it is yours (CLUSTER=existing)
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import yaml

from speccache_runtime.bench.client import complete
from speccache_runtime.bench.prompts import Prompt, load_prompts
from speccache_runtime.bench.report import COLD, RESTORED, TITLES, WITHHELD, Report, Run
from speccache_runtime.errors import SpecCacheError
from speccache_tools.cluster.settings import REPOSITORY
from speccache_tools.stage import reach, release, serving
from speccache_tools.stage.diagnosis import explain
from speccache_tools.stage.kube import SCD, StageError
from speccache_tools.stage.progress import Progress, follow
from speccache_tools.stage.venue import Venue, find_venue, is_callers

NAMESPACE = "speccache-demo"
NEW_TOKENS = 64
SAMPLE = REPOSITORY / "samples" / "tiny.yaml"
NAME: str = yaml.safe_load(SAMPLE.read_text())["metadata"]["name"]

_READY_SECONDS = 300
"""A node that has to read a runtime image of gigabytes from a slow disk for the first time."""


def up(venue: Venue, say: Progress) -> None:
    """The whole demonstration. Raises StageError or SpecCacheError; what was made stays for a look at it."""
    say(f"cluster {venue.kubectl('config', 'current-context').strip()}: installing the charts")
    release.install(venue)
    say(f"namespace {NAMESPACE}: restricted pods only")
    release.make_namespace(venue, NAMESPACE)
    # The cold run must be cold: an earlier demo's resource goes first, and its storage with it.
    venue.kubectl.delete(SCD, NAME, NAMESPACE)
    venue.kubectl.until_gone("pvc", f"{NAME}-kv", NAMESPACE, seconds=60)
    say(f"kubectl apply -f {SAMPLE.relative_to(REPOSITORY)}")
    venue.kubectl.apply(SAMPLE.read_text(), NAMESPACE)
    follow(venue, NAMESPACE, NAME, say, seconds=_READY_SECONDS)
    runs = [_measure(venue, COLD, say)]
    say("deleting the pod; the operator's Deployment makes its successor on the same storage")
    venue.kubectl.delete("pod", serving.pod_of(venue, NAMESPACE, NAME)["metadata"]["name"], NAMESPACE, wait=False)
    follow(venue, NAMESPACE, NAME, say, seconds=_READY_SECONDS)
    runs.append(_measure(venue, RESTORED, say))
    lost = serving.withhold_drafts(venue, NAMESPACE, NAME)
    say(f"deleted the draft half of {lost} stored pages; spec.kvCache.storage.missingDraft: Degrade rolls the pod")
    venue.kubectl.patch(SCD, NAME, NAMESPACE, {"spec": {"kvCache": {"storage": {"missingDraft": "Degrade"}}}})
    follow(venue, NAMESPACE, NAME, say, seconds=_READY_SECONDS)
    runs.append(_measure(venue, WITHHELD, say))
    sys.stdout.write(f"\n{Report(runs).to_text()}\n{_farewell(venue)}")


def down() -> None:
    """Take everything off. Raises StageError."""
    if is_callers():
        release.uninstall(find_venue(), NAMESPACE)
    else:  # and with it everything that is on it
        subprocess.run([sys.executable, "-m", "speccache_tools.cluster", "down"], check=True)


def ask(url: str, model: str, run: str, prompts: tuple[Prompt, ...], told: Callable[[], None] = lambda: None) -> Run:
    """Send the prompts one at a time; `told` is called after each."""
    answers = []
    for prompt in prompts:
        answers.append(complete(url, model, prompt.text, NEW_TOKENS))
        told()
    return Run(run, prompts, answers)


def _measure(venue: Venue, name: str, say: Progress) -> Run:
    prompts = load_prompts()
    with reach.service(venue, NAMESPACE, NAME) as url:
        say(f"{TITLES[name]}: {len(prompts)} prompts ", end="")
        begun = time.monotonic()
        run = ask(url, NAME, name, prompts, told=say.dot)
        say.more(f" {time.monotonic() - begun:.1f} s\n")
        if name == COLD:
            say(f"storage has all pages now: {serving.wait_written(url) / 2**20:.0f} MiB")
    return run


def _farewell(venue: Venue) -> str:
    body = f'{{"model": "{NAME}", "prompt": "def main():", "max_tokens": 64}}'
    url, lines = reach.service_address(venue, NAMESPACE, NAME), []
    clean = "make demo-down"
    if not venue.ours:
        url, clean = "http://127.0.0.1:8000", "CLUSTER=existing make demo-down"
        lines = [f"  kubectl --namespace {NAMESPACE} port-forward service/{NAME} 8000 &"]
    lines.append(f"  curl --noproxy '*' {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
    return "\n".join(["The model is still served. Talk to it:", "", *lines, "", f"Clean up: {clean}", ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m speccache_tools.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("up", "down"))
    if parser.parse_args().command == "down":
        return _told(down)
    say = Progress()
    try:
        venue = find_venue()
    except StageError as error:
        say(str(error))
        return 1
    code = _told(lambda: up(venue, say))
    if code:
        sys.stderr.write(explain(venue, NAMESPACE))
    return code


def _told(work: Callable[[], None]) -> int:
    try:
        work()
    except (StageError, SpecCacheError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
