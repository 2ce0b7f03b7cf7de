"""What a restart costs, as a table and as JSON: several runs of the same prompts, each compared with the cold one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from speccache_runtime.bench.client import Answer
from speccache_runtime.bench.prompts import Prompt

COLD, RESTORED, WITHHELD, PLAIN = "cold", "restored", "draft_withheld", "plain"

TITLES = {
    COLD: "cold",
    RESTORED: "after restart, pairs restored",
    WITHHELD: "after restart, draft half withheld",
    PLAIN: "without speculation, cold",
}
TIERS = ("device", "host", "storage")
_HEAD = ("run", "cached tokens (device/host/storage)", "TTFT", "TPOT", "accept length", "same text as cold")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of one run, in the order of the prompts."""

    name: str
    prompts: Sequence[Prompt]
    answers: Sequence[Answer]

    def of_kind(self, kind: str) -> Run:
        """The part of the run with prompts of one kind."""
        pairs = [(p, a) for p, a in zip(self.prompts, self.answers, strict=True) if p.kind == kind]
        return Run(self.name, [prompt for prompt, _ in pairs], [answer for _, answer in pairs])

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(prompt.kind for prompt in self.prompts))

    @property
    def prompt_tokens(self) -> int:
        return sum(int(answer.usage["prompt_tokens"]) for answer in self.answers)

    @property
    def completion_tokens(self) -> int:
        return sum(answer.completion_tokens for answer in self.answers)

    @property
    def cached_tokens(self) -> dict[str, int]:
        """Prompt tokens that were not computed, by tier, over all prompts."""
        return {tier: sum(a.usage["prompt_tokens_details"][tier] for a in self.answers) for tier in TIERS}

    @property
    def ttft_ms(self) -> float:
        """Median over the prompts."""
        return 1000 * statistics.median(answer.first_token for answer in self.answers)

    @property
    def tpot_ms(self) -> float:
        """Median over the prompts that have more than one token; 0 when none has."""
        times = [answer.time_per_token for answer in self.answers if answer.time_per_token is not None]
        return 1000 * statistics.median(times) if times else 0.0

    @property
    def accept_length(self) -> float:
        """Generated tokens per verify step, over all prompts together."""
        return _ratio(self.completion_tokens, self._sum("verify_steps"))

    @property
    def accept_length_first64(self) -> float:
        """The same over the verify steps that began before a prompt's 64th new token."""
        return _ratio(self._sum("tokens_first64"), self._sum("verify_steps_first64"))

    def same_text(self, cold: Run) -> bool:
        """Every prompt has the text that it had in the cold run."""
        return [answer.text for answer in self.answers] == [answer.text for answer in cold.answers]

    def same_steps(self, cold: Run) -> bool:
        """Every prompt's verify steps accepted the same numbers of tokens as in the cold run."""
        return [_accepted(answer) for answer in self.answers] == [_accepted(answer) for answer in cold.answers]

    def summary(self, cold: Run) -> Json:
        """The run's numbers in the JSON report."""
        return {
            "name": self.name,
            "prompts": len(self.answers),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_ms": round(self.ttft_ms, 3),
            "tpot_ms": round(self.tpot_ms, 3),
            "accept_length": round(self.accept_length, 4),
            "accept_length_first64": round(self.accept_length_first64, 4),
            "same_text": self.same_text(cold),
            "same_steps": self.same_steps(cold),
        }

    def _sum(self, name: str) -> int:
        return sum(int(answer.usage["speculation"][name]) for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Report:
    """`runs` begins with the cold one. `plain` is the same prompts without speculation, or None when not measured."""

    runs: Sequence[Run]
    plain: Run | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    """Where and with what it was measured."""

    @property
    def cold(self) -> Run:
        return self.runs[0]

    def to_json(self) -> str:
        """One object, indented, with a newline at its end."""
        body: Json = {"runs": [self._with_kinds(run) for run in self.runs]}
        if self.plain is not None:
            body["plain"] = self._with_kinds(self.plain)
            body["decode_speed_over_plain"] = {run.name: round(self.decode_speed(run), 3) for run in self.runs}
        return json.dumps({**body, **self.about}, indent=2) + "\n"

    def to_text(self) -> str:
        """The table, accept lengths by kind of prompt, and how speculation compares with none."""
        lines = [*self._table(), "", *self._by_kind()]
        by_name = {run.name: run for run in self.runs}
        if self.plain is not None and RESTORED in by_name and WITHHELD in by_name:
            restored, withheld = (self.decode_speed(by_name[name]) for name in (RESTORED, WITHHELD))
            lines += [
                "",
                f"paired restore decodes {restored:.1f}× as fast as plain decoding; "  # noqa: RUF001
                f"with the draft half withheld {withheld:.1f}×",  # noqa: RUF001
            ]
        return "\n".join(lines) + "\n"

    def decode_speed(self, run: Run) -> float:
        """How many times as fast as without speculation a token of `run` came, by median time per token."""
        return _ratio(self.plain.tpot_ms if self.plain else 0.0, run.tpot_ms)

    def _with_kinds(self, run: Run) -> Json:
        kinds = {kind: run.of_kind(kind).summary(self.cold.of_kind(kind)) for kind in run.kinds}
        return {**run.summary(self.cold), "by_kind": kinds}

    def _table(self) -> list[str]:
        rows = [_HEAD]
        for run in [*self.runs, *([self.plain] if self.plain else [])]:
            same = "yes" if run.same_text(self.cold) else "NO"
            cached = " / ".join(str(run.cached_tokens[tier]) for tier in TIERS)
            rows.append(
                (
                    TITLES.get(run.name, run.name),
                    f"{cached} of {run.prompt_tokens}",
                    f"{run.ttft_ms:.0f} ms",
                    f"{run.tpot_ms:.2f} ms",
                    f"{run.accept_length:.2f}",
                    "–" if run is self.cold else same,  # noqa: RUF001
                )
            )
        return _aligned(rows)

    def _by_kind(self) -> Iterable[str]:
        for kind in self.cold.kinds:
            lengths = (f"{TITLES.get(run.name, run.name)} {run.of_kind(kind).accept_length:.2f}" for run in self.runs)
            yield f"accept length on {len(self.cold.of_kind(kind).answers)} {kind} prompts: {', '.join(lengths)}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A Markdown table whose columns also line up on a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _accepted(answer: Answer) -> list[int]:
    return list(answer.usage["speculation"]["accepted_by_step"])


def _ratio(count: float, by: float) -> float:
    return count / by if by else 0.0
