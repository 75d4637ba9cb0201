# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The names in the code and the reference that users read are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.instrumentation.tunix import semconv

REFERENCE = Path(__file__).parents[2] / "docs" / "telemetry.md"


def rows(section: str) -> set[str]:
    """Body rows of the tables below one heading of the reference."""
    text = REFERENCE.read_text(encoding="utf-8")
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return {line for line in body.splitlines() if line.startswith("| `")}


def spans(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("Spans", {f"| `{s.name}` | {s.when} |" for s in semconv.SPANS}),
        (
            "Attributes",
            {
                f"| `{a.name}` | {a.type.__name__} | {spans(a.on)} | {a.when} |"
                for a in semconv.ATTRIBUTES
            },
        ),
        (
            "Metrics",
            {f"| `{m.name}` | {m.instrument} | `{m.unit}` | {m.when} |" for m in semconv.METRICS},
        ),
        ("Events", {f"| `{e.name}` | {e.when} |" for e in semconv.EVENTS}),
    ],
)
def test_the_reference_lists_exactly_what_the_code_declares(
    section: str, expected: set[str]
) -> None:
    """Names, types, units and conditions, word for word."""
    assert rows(section) == expected


def test_names_are_declared_once() -> None:
    """No span, attribute, metric or event is declared twice."""
    for declared in (semconv.SPANS, semconv.ATTRIBUTES, semconv.METRICS, semconv.EVENTS):
        names = [item.name for item in declared]
        assert len(names) == len(set(names))
