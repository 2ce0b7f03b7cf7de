"""`serve` as a newcomer and as a pod run it: the real engine, the built-in pair. Restarts: `bench/test_restart.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from speccache_api.geometry import Inspection, builtin_facts
from speccache_api.sizing import size_memory
from speccache_api.wire import build_wire
from speccache_runtime.bench.client import complete
from speccache_runtime.bench.prompts import load_prompts
from speccache_runtime.bench.server import Server
from speccache_runtime.local import parse_resource, read_resource

pytestmark = pytest.mark.program

SAMPLES = Path(__file__).parents[3] / "samples"


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def served(storage: Path) -> Iterator[httpx.Client]:
    arguments = ("-f", SAMPLES / "tiny.yaml", "--storage-dir", storage)
    with Server(*arguments) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


Post = Callable[..., httpx.Response]


@pytest.fixture
def post(served: httpx.Client) -> Post:
    def send(path: str, **body: object) -> httpx.Response:
        return served.post(path, json={"model": "tiny", "temperature": 0} | body)

    return send


def test_completion(post: Post):
    """Text, a reason, and usage that adds up."""
    body = post("/v1/completions", prompt="def main():\n", max_tokens=24).json()
    usage = body["usage"]
    assert body["choices"][0]["text"]
    assert body["choices"][0]["finish_reason"] in ("length", "stop")
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["speculation"]["verify_steps"] <= usage["completion_tokens"]


def test_chat(post: Post):
    """The pair has a chat template."""
    body = post("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], max_tokens=8).json()
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["usage"]["completion_tokens"] <= 8


def test_stream_is_the_same_text(post: Post, served: httpx.Client):
    """A greedy text does not depend on how it is delivered."""
    whole = post("/v1/completions", prompt="import os\n", max_tokens=40).json()["choices"][0]["text"]
    streamed = complete(str(served.base_url).rstrip("/"), "tiny", "import os\n", 40)
    assert streamed.text == whole


def test_seed(post: Post):
    """A sampled text can be had again with its seed."""
    texts = [
        post("/v1/completions", prompt="class ", max_tokens=20, temperature=1, seed=seed).json()["choices"][0]["text"]
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_stop_string(post: Post, served: httpx.Client):
    """The text ends where the stop string would begin, and counts as stopped."""
    text = post("/v1/completions", prompt="import os\n", max_tokens=40).json()["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    cut = post("/v1/completions", prompt="import os\n", max_tokens=40, stop=stop).json()["choices"][0]
    assert cut == {"index": 0, "text": text[: text.index(stop)], "logprobs": None, "finish_reason": "stop"}
    assert 'speccache_requests_total{finish="abort"}' not in served.get("/metrics").text


def test_second_time_is_a_device_hit(post: Post):
    """All whole pages of the prompt, and the same text."""
    prompt = load_prompts()[0].text
    first, second = (post("/v1/completions", prompt=prompt, max_tokens=16).json() for _ in range(2))
    details = second["usage"]["prompt_tokens_details"]
    assert details["device"] >= 0.9 * second["usage"]["prompt_tokens"]
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


def test_probes_and_metrics(served: httpx.Client):
    """What a cluster asks."""
    assert served.get("/health").status_code == served.get("/ready").status_code == 200
    assert [model["id"] for model in served.get("/v1/models").json()["data"]] == ["tiny"]
    metrics = served.get("/metrics").text
    assert "speccache_prompt_tokens_total" in metrics
    assert "speccache_time_to_first_token_seconds_bucket" in metrics


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
        ({"prompt": "x " * 20_000}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "x", "n": 3}, "n"),
    ],
)
def test_refusals(post: Post, body: dict, param: str):
    """The limits are those of the real model."""
    answer = post("/v1/completions", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_wire_document_without_speculation(tmp_path: Path, served: httpx.Client):
    """What a pod of the other sample runs: the operator's document. One token per pass, and the same text."""
    resource = parse_resource(read_resource(SAMPLES / "tiny-plain.yaml"), SAMPLES)
    inspection = Inspection(builtin_facts("tiny").target)
    document = tmp_path / "wire.json"
    document.write_text(build_wire(resource, inspection, size_memory(resource.spec, inspection)).to_json())
    with Server("--wire", document, "--host", "127.0.0.1") as server:
        plain = complete(server.url, "tiny", "import os\n", 40)
    speculative = complete(str(served.base_url).rstrip("/"), "tiny", "import os\n", 40)
    # The first token comes from the prompt's pass, which is no verify step.
    assert plain.usage["speculation"]["verify_steps"] == plain.completion_tokens - 1
    assert speculative.usage["speculation"]["verify_steps"] < plain.completion_tokens / 2
    assert plain.text == speculative.text
