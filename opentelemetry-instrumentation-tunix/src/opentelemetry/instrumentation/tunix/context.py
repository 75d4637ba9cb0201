# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The run that is going on here, and where the spans of its steps hang.

Back ends refuse a trace of 100,000 steps. Unless the application has a span of its own active when
the run begins, each step is therefore a trace of its own with a link to `tunix.run`, which is then
not made current: a data loader's HTTP spans would all join it. Under an application's span
everything nests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, TypeAlias

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Link, Span
from opentelemetry.util.types import AttributeValue

from . import semconv
from .telemetry import SpanScope, Telemetry, report_failure

if TYPE_CHECKING:
    from .accounting import TimeAccount

Attributes: TypeAlias = Callable[[], dict[str, AttributeValue]]
"""Attributes on demand: a span that is not recorded costs none."""

# The job id that a launcher gives to all ranks and keeps over restarts.
_JOB_IDS: Final = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
DEFAULT_ROLE: Final = "trainer"
_NOTHING: Final[AbstractContextManager[Span | None]] = nullcontext()


class Run:
    """A run of this execution context.

    Attributes:
        id: Value of `tunix.run.id`.
        link: What roots of the run link to; None where the run's spans are plain children, and
            where there is no `tunix.run` to link to.
        step_is_root: Whether a step begins a trace of its own.
        span: `tunix.run`; None where it is not drawn.
        batch_shape: Shape of the first batch, once it is known.
        role: Whose run it is, in the words of `tunix.role`.
        account: Where its time went.
    """

    __slots__ = ("account", "batch_shape", "id", "link", "role", "span", "step_is_root")

    def __init__(
        self,
        id: str,  # noqa: A002  it is the run's id
        step_is_root: bool,
        role: str,
        account: TimeAccount,
    ) -> None:
        self.id = id
        self.step_is_root = step_is_root
        self.role = role
        self.account = account
        self.link: Link | None = None
        self.span: Span | None = None
        self.batch_shape: tuple[int, ...] | None = None


# The run travels in the OpenTelemetry context: wherever that is carried, the run is known.
_RUN_KEY: Final = otel_context.create_key("tunix-run")
_runs: set[Run] = set()


def run_in(context: otel_context.Context | None = None) -> Run | None:
    """The run that a context belongs to; None for the current context."""
    found = otel_context.get_value(_RUN_KEY, context)
    return found if isinstance(found, Run) else None


def current_run(context: otel_context.Context | None = None) -> Run | None:
    """The run that the calling code, or code with that context, belongs to.

    A thread that a run has started may carry no context: where there is one run, that is it.
    """
    here = run_in(context)
    if here is None and len(_runs) == 1:
        here = next(iter(_runs), None)
    return here


@contextmanager
def run(
    telemetry: Telemetry,
    attributes: Attributes,
    at_end: Callable[[Run], None] = lambda _: None,
    *,
    message: bool = True,
    role: str = DEFAULT_ROLE,
) -> Generator[None]:
    """Opens a run around the block, unless the block is inside one already.

    `tunix.run` is its span, and `tunix.run.start` an event that tells of it at once: the span
    itself is exported when the run is over, which may be in a week.

    Args:
        telemetry: What to emit through.
        attributes: Makes the attributes of the run.
        at_end: Called with the run when the block has ended, however, before the span ends.
        message: Whether the message of an exception may leave.
        role: Whose run it is.
    """
    if run_in() is not None:
        yield
        return
    # Not at import: every Python process of an instrumented tree imports this module.
    from .accounting import TimeAccount

    nested = trace.get_current_span().get_span_context().is_valid
    step_is_root = telemetry.options.trace_per_step
    wall, began = time.time_ns(), time.perf_counter_ns()
    here = Run(
        _run_id(telemetry),
        step_is_root if isinstance(step_is_root, bool) else not nested,
        role,
        TimeAccount(telemetry, began),
    )
    token = otel_context.attach(otel_context.set_value(_RUN_KEY, here))
    _runs.add(here)
    try:
        facts = _facts(attributes)
        scope = _scope(
            telemetry,
            semconv.RUN,
            lambda: facts,
            current=not here.step_is_root,
            start_time=wall,
            message=message,
        )
        with scope as here.span:
            if here.span is not None and here.step_is_root:
                here.link = Link(here.span.get_span_context())
            telemetry.log_event(
                semconv.RUN_START, {**facts, semconv.RUN_ID: here.id}, span=here.span
            )
            try:
                yield
            finally:
                at_end(here)
                here.account.close(time.perf_counter_ns())
    finally:
        _runs.discard(here)
        otel_context.detach(token)


def span(
    telemetry: Telemetry, name: str, attributes: Attributes
) -> AbstractContextManager[Span | None]:
    """A span of the current run, for a `with` block.

    A child of the span that is current here; where there is none, a root with a link to the run.

    Args:
        telemetry: What to emit through.
        name: Span name.
        attributes: Makes the attributes; the run id is added.
    """
    return _scope(telemetry, name, attributes, links=_links())


def past_span(
    telemetry: Telemetry,
    name: str,
    attributes: Attributes,
    *,
    start_ns: int,
    end_ns: int | None = None,
    error: BaseException | None = None,
) -> None:
    """Emits a span of the current run that is over already.

    Args:
        telemetry: What to emit through.
        name: Span name.
        attributes: Makes the attributes; the run id is added.
        start_ns: Nanoseconds since the epoch.
        end_ns: Nanoseconds since the epoch; None for now.
        error: What the call raised.
    """
    scope = _scope(
        telemetry, name, attributes, links=_links(), start_time=start_ns, end_time=end_ns
    )
    scope.__enter__()
    scope.__exit__(None if error is None else type(error), error, None)


def start_step(telemetry: Telemetry, name: str, start_ns: int) -> Span:
    """Starts a span that begins a trace of its own where steps do.

    It is then a root that links to the run, whatever span is current; else a plain child.
    """
    here = run_in()
    if here is None or not here.step_is_root:
        return telemetry.start_span(name, start_time=start_ns)
    return telemetry.start_span(
        name,
        # An invalid span in the current context and not an empty context, which drops baggage.
        context=trace.set_span_in_context(INVALID_SPAN),
        links=() if here.link is None else (here.link,),
        start_time=start_ns,
    )


def _links() -> tuple[Link, ...]:
    """Links of a span that is made here: to the run, where it has no parent."""
    here = run_in()
    alone = not trace.get_current_span().get_span_context().is_valid
    return (here.link,) if alone and here is not None and here.link is not None else ()


def _scope(
    telemetry: Telemetry,
    name: str,
    attributes: Attributes,
    *,
    links: tuple[Link, ...] = (),
    current: bool = True,
    start_time: int | None = None,
    end_time: int | None = None,
    message: bool = True,
) -> AbstractContextManager[Span | None]:
    if semconv.GROUPS[name] not in telemetry.span_groups:
        return _NOTHING
    here = run_in()

    def all_attributes() -> dict[str, AttributeValue]:
        found = identity(telemetry, here)
        try:
            found.update(attributes())
        except Exception:
            report_failure(f"reading the attributes of {name}")
        return found

    return SpanScope(
        telemetry,
        name,
        all_attributes,
        links=links,
        current=current,
        start_time=start_time,
        end_time=end_time,
        message=message,
    )


def identity(telemetry: Telemetry, run: Run | None) -> dict[str, AttributeValue]:
    """What every span tells: its process, where there are several, and its run."""
    found = dict(telemetry.process_attributes)
    if run is not None:
        found[semconv.RUN_ID] = run.id
    return found


def _facts(attributes: Attributes) -> dict[str, AttributeValue]:
    try:
        return attributes()
    except Exception:
        report_failure("describing a run")
        return {}


def _run_id(telemetry: Telemetry, environ: Mapping[str, str] = os.environ) -> str:
    if telemetry.options.run_id is not None:
        return telemetry.options.run_id
    given = next((environ[name] for name in _JOB_IDS if environ.get(name)), None)
    # From the operating system: the random module repeats after random.seed().
    return given or os.urandom(16).hex()
