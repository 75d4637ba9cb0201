# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Every span, attribute and metric name this distribution emits, once.

Each name is declared with what a reader of the telemetry needs to know about it; the declaration
returns the plain string, so that the code which emits it pays nothing. `docs/telemetry.md` lists
the same facts, and a test compares the two.

Named tuples here and elsewhere, not data classes: they cost a quarter to define, and every Python
process of an instrumented tree imports this package.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from opentelemetry.semconv.schemas import Schemas

SCHEMA_URL: Final = Schemas.V1_41_1.value
SCOPE: Final = "opentelemetry.instrumentation.tunix"
# The gauges keep the scope of the library that they belong to, so that a dashboard made for the
# facade of tunix-core works on google-tunix too.
GAUGE_SCOPE: Final = "tunix"


class SpanName(NamedTuple):
    """A span name and when a span of that name exists."""

    name: str
    when: str


class Attribute(NamedTuple):
    """An attribute key, the type of its value, where it stands and when."""

    name: str
    type: type
    on: tuple[str, ...]
    when: str


class Metric(NamedTuple):
    """A metric name with its instrument and UCUM unit."""

    name: str
    instrument: str
    unit: str
    when: str


class Event(NamedTuple):
    """A log record with an event name."""

    name: str
    when: str


SPANS: Final[list[SpanName]] = []
ATTRIBUTES: Final[list[Attribute]] = []
METRICS: Final[list[Metric]] = []
EVENTS: Final[list[Event]] = []


def _span(name: str, when: str) -> str:
    SPANS.append(SpanName(name, when))
    return name


def _attribute(name: str, type_: type, on: tuple[str, ...], when: str) -> str:
    ATTRIBUTES.append(Attribute(name, type_, on, when))
    return name


def _metric(name: str, instrument: str, unit: str, when: str) -> str:
    METRICS.append(Metric(name, instrument, unit, when))
    return name


def _event(name: str, when: str) -> str:
    EVENTS.append(Event(name, when))
    return name


# Spans ------------------------------------------------------------------------------------------

RUN: Final = _span(
    "tunix.run", "outermost PeftTrainer.train, RLLearner.train or AgenticRLLearner.train"
)
MODEL_TRAIN: Final = _span("tunix.model.train", "one call of the train step: one micro-batch")
MODEL_EVAL: Final = _span("tunix.model.eval", "one evaluation over the evaluation data set")
CHECKPOINT_SAVE: Final = _span("tunix.checkpoint.save", "a checkpoint that was really written")

_ALL: Final = (RUN, MODEL_TRAIN, MODEL_EVAL, CHECKPOINT_SAVE)

# Attributes -------------------------------------------------------------------------------------

RUN_ID: Final = _attribute("tunix.run.id", str, _ALL, "inside a run")
TRAINING_STEP: Final = _attribute(
    "tunix.training.step",
    int,
    (MODEL_TRAIN, MODEL_EVAL, CHECKPOINT_SAVE),
    "train: the update this micro-batch belongs to, from 1; eval and checkpoint: updates done",
)
TRAINING_MICRO_STEP: Final = _attribute(
    "tunix.training.micro_step",
    int,
    (MODEL_TRAIN,),
    "the micro-batch within its update, from 1 to the accumulation steps",
)
HOST_ONLY: Final = _attribute(
    "tunix.host_only",
    bool,
    (MODEL_TRAIN,),
    "true where the span ends when the call returns, while the device may still work",
)
ERROR_TYPE: Final = _attribute(
    "error.type", str, _ALL, "the call raised: the qualified class name of the exception"
)
INTERRUPTED: Final = _attribute(
    "tunix.interrupted",
    str,
    _ALL,
    "KeyboardInterrupt, SystemExit or a cancellation passed the span: its class name",
)
LIBRARY_NAME: Final = _attribute(
    "tunix.library.name", str, (RUN,), "the distribution that is instrumented, where it is known"
)
LIBRARY_VERSION: Final = _attribute(
    "tunix.library.version", str, (RUN,), "its version, where it is known"
)

# Metrics (scope tunix; the facade's set, see _gauges.py for how values and names are treated) ----

_LOGGED: Final = "the library logged it"
TRAINING_LOSS: Final = _metric("tunix.training.loss", "gauge", "1", _LOGGED)
TRAINING_PERPLEXITY: Final = _metric("tunix.training.perplexity", "gauge", "1", _LOGGED)
TRAINING_LEARNING_RATE: Final = _metric("tunix.training.learning_rate", "gauge", "1", _LOGGED)
TRAINING_GRADIENT_NORM: Final = _metric("tunix.training.gradient.norm", "gauge", "1", _LOGGED)
TRAINING_STEP_GAUGE: Final = _metric("tunix.training.step", "gauge", "{step}", _LOGGED)

# Events -----------------------------------------------------------------------------------------

EXCEPTION: Final = _event("tunix.exception", "an exception passed a span; once for each exception")
