"""Sums, medians and comparisons of the report, and the two forms it is printed in."""

from __future__ import annotations

import json

import pytest

from speccache_runtime.bench.report import COLD, PLAIN, RESTORED, WITHHELD, Report


@pytest.fixture
def report(run, answer):
    cold = run(COLD, [answer(), answer(), answer()])
    restored = run(RESTORED, [answer(cached=960, seconds=0.5) for _ in range(3)])
    withheld = run(WITHHELD, [answer(cached=960, steps=32, seconds=1.5) for _ in range(3)])
    plain = run(PLAIN, [answer(steps=64, seconds=1.25) for _ in range(3)])
    return Report([cold, restored, withheld], plain, {"hardware": {"cores": 2}})


def test_json_has_the_promised_shape(report):
    """Every key that others read, and sums over the prompts."""
    body = json.loads(report.to_json())
    assert [run["name"] for run in body["runs"]] == ["cold", "restored", "draft_withheld"]
    restored = body["runs"][1]
    promised = {"name", "prompts", "prompt_tokens", "cached_tokens", "ttft_ms", "tpot_ms", "accept_length"}
    assert promised | {"accept_length_first64", "same_text"} <= set(restored)
    assert (restored["prompts"], restored["prompt_tokens"]) == (3, 3000)
    assert restored["cached_tokens"] == {"device": 0, "host": 0, "storage": 2880}
    assert (restored["ttft_ms"], restored["accept_length"], restored["accept_length_first64"]) == (250.0, 4.0, 2.0)
    assert restored["tpot_ms"] == pytest.approx(1000 * 0.25 / 63, abs=0.001)
    assert restored["same_text"] is True
    assert body["runs"][2]["by_kind"]["copy"]["accept_length"] == 2.0
    assert body["decode_speed_over_plain"] == {"cold": 1.25, "restored": 2.5, "draft_withheld": 0.833}
    assert body["hardware"] == {"cores": 2}


def test_text(report):
    """A Markdown table whose columns line up, accept lengths by kind, and the comparison in words."""
    lines = report.to_text().splitlines()
    table = lines[:6]
    assert len({len(line) for line in table}) == 1
    assert [cell.strip() for cell in table[0].split("|")[1:-1]] == [
        "run",
        "cached tokens (device/host/storage)",
        "TTFT",
        "TPOT",
        "accept length",
        "same text as cold",
    ]
    assert [cell.strip() for cell in table[3].split("|")[1:-1]] == [
        "after restart, pairs restored",
        "0 / 0 / 2880 of 3000",
        "250 ms",
        "3.97 ms",
        "4.00",
        "yes",
    ]
    assert table[2].split("|")[-2].strip() == "–"  # noqa: RUF001
    assert "accept length on 2 natural prompts: cold 4.00" in report.to_text()
    assert lines[-1] == (
        "paired restore decodes 2.5× as fast as plain decoding; with the draft half withheld 0.8×"  # noqa: RUF001
    )


def test_without_a_plain_run(report):
    """The cluster demo measures no plain run; the rest is the same."""
    alone = Report(report.runs)
    assert "plain" not in alone.to_text()
    assert "plain" not in json.loads(alone.to_json())


def test_accept_length_is_over_all_tokens(run, answer):
    """Not a mean of means: a prompt with few tokens counts little."""
    assert run(
        COLD, [answer(tokens=64, steps=8), answer(tokens=64, steps=8), answer(tokens=2, steps=2)]
    ).accept_length == (pytest.approx(130 / 18))


def test_other_text_is_seen(run, answer):
    """One changed character in one prompt, or one other count in one step."""
    cold = run(COLD, [answer(), answer(), answer()])
    text = run(RESTORED, [answer(), answer("abd"), answer()])
    steps = run(RESTORED, [answer(), answer(), answer(steps=32)])
    assert (text.same_text(cold), text.same_steps(cold)) == (False, True)
    assert (steps.same_text(cold), steps.same_steps(cold)) == (True, False)
    assert "| NO" in Report([cold, text]).to_text()


def test_one_token_has_no_time_per_token(run, answer):
    """A text that ends at once does not break the medians."""
    ended = run(COLD, [answer(tokens=1, steps=1)] * 3)
    assert ended.tpot_ms == 0.0
    assert run(COLD, [answer(tokens=1, steps=1), answer(), answer()]).tpot_ms > 0
