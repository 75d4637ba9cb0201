# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The run that is going on here, and where the spans of its steps hang.

Back ends refuse a trace of 100,000 steps. Unless the application has a span of its own active when
the run begins, each step is therefore a trace of its own with a link to `tunix.run`, which is then
not made current: a data loader's HTTP spans would all join it. Under an application's span
everything nests.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Link, Span
from opentelemetry.util.types import AttributeValue

from . import semconv
from .telemetry import SpanScope, Telemetry, report_failure


class Run(NamedTuple):
    """A run of this execution context.

    Attributes:
        id: Value of `tunix.run.id`.
        link: What roots of the run link to; None when the run nests under an application's span,
            so that its spans are plain children.
    """

    id: str
    link: Link | None


_run: ContextVar[Run | None] = ContextVar("tunix_run", default=None)


def current_run() -> Run | None:
    """The run that the calling code belongs to."""
    return _run.get()


@contextmanager
def run(telemetry: Telemetry, attributes: dict[str, AttributeValue]) -> Generator[None]:
    """Opens `tunix.run` around the block, unless the block is inside a run already."""
    if _run.get() is not None:
        yield
        return
    nested = trace.get_current_span().get_span_context().is_valid
    # uuid4 draws from the operating system; the random module repeats after random.seed().
    run_id = uuid.uuid4().hex
    span = _start(telemetry, semconv.RUN, {**attributes, semconv.RUN_ID: run_id}, None, ())
    link = None if nested or span is None else Link(span.get_span_context())
    token = _run.set(Run(run_id, link))
    try:
        with SpanScope(telemetry, span, current=nested):
            yield
    finally:
        _run.reset(token)


def span(
    telemetry: Telemetry,
    name: str,
    attributes: dict[str, AttributeValue],
    *,
    start_time: int | None = None,
) -> SpanScope:
    """A span of the current run, for a `with` block.

    A child of the span that is current here; where there is none, a root with a link to the run.

    Args:
        telemetry: What to emit through.
        name: Span name.
        attributes: Attributes known at the start; the run id is added.
        start_time: Nanoseconds since the epoch, for a span that is made after the fact.
    """
    here = _run.get()
    if here is None:
        return SpanScope(telemetry, _start(telemetry, name, attributes, start_time, ()))
    attributes[semconv.RUN_ID] = here.id
    links = ()
    if here.link is not None and not trace.get_current_span().get_span_context().is_valid:
        links = (here.link,)
    return SpanScope(telemetry, _start(telemetry, name, attributes, start_time, links))


def step_span(telemetry: Telemetry, name: str, attributes: dict[str, AttributeValue]) -> SpanScope:
    """A span that begins a trace of its own, for a `with` block.

    A root that links to the run, whatever span is current; a plain child where the run nests under
    an application's span or where there is no run.
    """
    here = _run.get()
    if here is None or here.link is None:
        return span(telemetry, name, attributes)
    attributes[semconv.RUN_ID] = here.id
    # An invalid span in the current context, and not an empty context, which would drop baggage.
    root = trace.set_span_in_context(INVALID_SPAN)
    return SpanScope(telemetry, _start(telemetry, name, attributes, None, (here.link,), root))


def _start(
    telemetry: Telemetry,
    name: str,
    attributes: dict[str, AttributeValue],
    start_time: int | None,
    links: tuple[Link, ...],
    context: otel_context.Context | None = None,
) -> Span | None:
    try:
        return telemetry.start_span(
            name, attributes, context=context, links=links, start_time=start_time
        )
    except Exception:
        report_failure(f"starting {name}")
        return None
