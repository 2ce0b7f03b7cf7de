"""One directory under engines that speculate in different ways: the target's pages are shared, a draft's never."""

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file

from speccache_runtime.config import EngineConfig, StorageConfig
from speccache_runtime.core import Output, Request, SamplingParams, Usage
from speccache_runtime.engine.service import EngineService

PATIENCE_S = 60.0
LOOKUPS = "speccache_page_lookups_total"


class Served:
    """One life of a service that answers all texts, and what its counters say of storage."""

    def __init__(self, config: EngineConfig, texts: list[list[int]], new: int) -> None:
        self.registry = CollectorRegistry()
        service = EngineService(config, self.registry)
        service.start()
        self.tokens: list[tuple[int, ...]] = []
        self.usages: list[Usage] = []
        for number, text in enumerate(texts):
            outputs: list[Output] = []
            ended = threading.Event()

            def take(output: Output, outputs: list[Output] = outputs, ended: threading.Event = ended) -> None:
                outputs.append(output)
                if output.finish is not None:
                    ended.set()

            service.submit(Request(f"r{number}", tuple(text), SamplingParams(max_tokens=new)), take)
            assert ended.wait(PATIENCE_S)
            assert outputs[-1].usage is not None
            self.tokens.append(tuple(token for output in outputs for token in output.tokens))
            self.usages.append(outputs[-1].usage)
        service.drain(PATIENCE_S, PATIENCE_S)
        service.stop()

    def looked_up(self, half: str, result: str) -> float:
        labels = {"tier": "storage", "half": half, "result": result}
        return self.registry.get_sample_value(LOOKUPS, labels) or 0.0

    @property
    def absent(self) -> int:
        """Tokens of hits whose draft half there was none of."""
        return sum(usage.draft_absent_tokens for usage in self.usages)


@pytest.fixture
def other_head(pair: Any, tmp_path: Path) -> Path:
    """A head of the same shape with other weights."""
    folder = tmp_path / "other head"
    shutil.copytree(pair.draft_path, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["midlayer.self_attn.v_proj.weight"] += torch.tensor(0.01)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_target_is_found_by_all_and_a_draft_half_only_by_its_own_draft(
    pair: Any, tools: SimpleNamespace, texts: list[list[int]], other_head: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "storage"
    folder.mkdir()
    own: EngineConfig = tools.settings(pair, folder)
    assert own.storage is not None
    degrade = {"storage": StorageConfig(own.storage.target, "Degrade")}
    off = {"algorithm": "None", "draft_uri": None, "draft_path": None, "draft_geometry": None, "num_steps": 0}
    standalone = {
        "algorithm": "Standalone",
        "draft_path": pair.standalone_path,
        "draft_geometry": pair.standalone.facts.geometry,
    }

    def serve(**changes: Any) -> Served:
        served = Served(tools.settings(pair, folder, **{**degrade, **changes}), texts, tools.NEW)
        assert served.tokens == [pair.greedy(text, tools.NEW) for text in texts]
        return served

    pages = sum((len(text) - 1) // own.page_size for text in texts)
    first = serve()
    assert first.looked_up("target", "hit") == 0
    lives = {
        "its own draft": serve(),
        "no speculation": serve(**off),
        "another head": serve(draft_path=other_head),
        "another kind of draft": serve(**standalone),
        "its own draft again": serve(),
    }
    for name, served in lives.items():
        assert served.looked_up("target", "hit") == pages, name
        with_draft = name.startswith("its own")
        assert served.looked_up("draft", "hit") == (pages if with_draft else 0), name
        assert served.looked_up("draft", "corrupt") == 0, name
        drafts = name != "no speculation" and not with_draft
        assert served.absent == (pages * own.page_size if drafts else 0), name
