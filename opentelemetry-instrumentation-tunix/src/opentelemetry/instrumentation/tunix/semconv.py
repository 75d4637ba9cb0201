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

from opentelemetry.semconv.attributes import exception_attributes
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE as ERROR_TYPE_KEY
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
CHECKPOINT_RESTORE: Final = _span(
    "tunix.checkpoint.restore", "a checkpoint that was found and restored, or could not be"
)
JIT_COMPILE: Final = _span(
    "tunix.jit.compile",
    "JAX compiled a function: the train or evaluation step, or any other for 0.1 s or longer",
)

GROUPS: Final = {
    RUN: "run",
    MODEL_TRAIN: "train",
    MODEL_EVAL: "eval",
    CHECKPOINT_SAVE: "checkpoint",
    CHECKPOINT_RESTORE: "checkpoint",
    JIT_COMPILE: "compile",
}
"""The span group of each span."""


# Events -----------------------------------------------------------------------------------------

RUN_START: Final = _event(
    "tunix.run.start", "a run begins; carries the attributes of tunix.run that are known by then"
)
STEP_COMPLETED: Final = _event(
    "tunix.training.step_completed",
    "a logged step is complete: body = gauge name to value, one event per prefix, mode and step",
)
RECOMPILATION: Final = _event(
    "tunix.health.recompilation",
    "the train step was compiled again, at WARN; once for each change of its inputs",
)
EXCEPTION: Final = _event("tunix.exception", "an exception passed a span; once for each exception")

_CALLS: Final = (RUN, MODEL_TRAIN, MODEL_EVAL, CHECKPOINT_SAVE, CHECKPOINT_RESTORE)
_SPANS: Final = (*_CALLS, JIT_COMPILE)
_RUN: Final = (RUN, RUN_START)
_EVENTS: Final = (RUN_START, STEP_COMPLETED, RECOMPILATION, EXCEPTION)
_GAUGES: Final = "gauges"

# Metrics (scope opentelemetry.instrumentation.tunix) ----------------------------------------------

TRAIN_DURATION: Final = _metric(
    "tunix.model.train.duration",
    "histogram",
    "s",
    "from the call of the train step to its end on the device, queueing included; "
    "to the exception where it failed",
)
TRAIN_DEVICE_DURATION: Final = _metric(
    "tunix.model.train.device.duration", "histogram", "s", "what of that the device worked"
)
COMPILATIONS: Final = _metric(
    "tunix.jit.compilations", "counter", "{compilation}", "JAX compiled a function"
)
COMPILE_DURATION: Final = _metric(
    "tunix.jit.compile.duration", "histogram", "s", "tracing, lowering and compiling it"
)
TIME: Final = _metric(
    "tunix.time",
    "counter",
    "s",
    "wall time of a run, each second once for each mesh, by what it was spent on",
)
_INSTRUMENTS: Final = (TRAIN_DURATION, TRAIN_DEVICE_DURATION, COMPILATIONS, COMPILE_DURATION, TIME)

# Attributes -------------------------------------------------------------------------------------

RUN_ID: Final = _attribute(
    "tunix.run.id", str, (*_SPANS, RUN_START, STEP_COMPLETED, RECOMPILATION), "inside a run"
)
TRAINING_STEP: Final = _attribute(
    "tunix.training.step",
    int,
    (
        *(MODEL_TRAIN, MODEL_EVAL, CHECKPOINT_SAVE, CHECKPOINT_RESTORE),
        *(STEP_COMPLETED, RECOMPILATION),
    ),
    "train and recompilation: the update this micro-batch belongs to, from 1; eval and "
    "checkpoint: updates done, not on a restore that failed; step_completed: the step as it was "
    "logged",
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
    (MODEL_TRAIN, MODEL_EVAL),
    "false where the span covers the work of the device; true where its end could not be seen and "
    "the span ends when the call returned",
)
ROLE: Final = _attribute(
    "tunix.role",
    str,
    (MODEL_TRAIN, TRAIN_DURATION, TRAIN_DEVICE_DURATION, TIME),
    "whose work it is: the trainer's metrics prefix, trainer where it has none; not on idle time",
)
DISPATCH_DURATION: Final = _attribute(
    "tunix.dispatch.duration",
    float,
    (MODEL_TRAIN,),
    "seconds the call took on the host, compilation included",
)
QUEUE_DURATION: Final = _attribute(
    "tunix.queue.duration",
    float,
    (MODEL_TRAIN,),
    "seconds the work waited for earlier work of its devices after the call had returned",
)
DEVICE_DURATION: Final = _attribute(
    "tunix.device.duration",
    float,
    (MODEL_TRAIN, MODEL_EVAL),
    "seconds the devices worked; eval: the sum over its batches",
)
ERROR_TYPE: Final = _attribute(
    ERROR_TYPE_KEY,
    str,
    (*_CALLS, TRAIN_DURATION, TRAIN_DEVICE_DURATION),
    "the call raised, or its work failed on the device: the exception's qualified class name",
)
JIT_FUNCTION: Final = _attribute(
    "tunix.jit.function",
    str,
    (JIT_COMPILE, RECOMPILATION, COMPILATIONS, COMPILE_DURATION),
    "the compiled function's name; on metrics, other after 100 different ones",
)
JIT_CACHE: Final = _attribute(
    "tunix.jit.cache",
    str,
    (JIT_COMPILE, COMPILATIONS, COMPILE_DURATION),
    "hit or miss, where JAX's persistent compilation cache was asked",
)
JIT_TRACE_DURATION: Final = _attribute(
    "tunix.jit.trace.duration", float, (JIT_COMPILE,), "seconds JAX traced the Python function"
)
JIT_LOWER_DURATION: Final = _attribute(
    "tunix.jit.lower.duration", float, (JIT_COMPILE,), "seconds from the trace to StableHLO"
)
JIT_BACKEND_DURATION: Final = _attribute(
    "tunix.jit.backend.duration", float, (JIT_COMPILE,), "seconds XLA compiled or read its cache"
)
JIT_CHANGES: Final = _attribute(
    "tunix.jit.changes",
    list,
    (RECOMPILATION,),
    "arguments that differ from the first call's, as path: dtype[shape] -> dtype[shape]; empty "
    "where shapes and dtypes are the same",
)
TIME_BUCKET: Final = _attribute(
    "tunix.time.bucket", str, (TIME,), "productive, overhead, idle or wasted (work that failed)"
)
TIME_PHASE: Final = _attribute(
    "tunix.time.phase",
    str,
    (TIME,),
    "train, inputs, eval, compile, checkpoint, data_loading or idle",
)
MESH: Final = _attribute(
    "tunix.mesh", int, (TIME,), "which set of devices, by order of first use in the run, from 0"
)
EXCEPTION_TYPE: Final = _attribute(
    exception_attributes.EXCEPTION_TYPE, str, (EXCEPTION,), "always: the qualified class name"
)
EXCEPTION_MESSAGE: Final = _attribute(
    exception_attributes.EXCEPTION_MESSAGE,
    str,
    (EXCEPTION,),
    "unless it came out of a learner, whose rewards and environments may quote a prompt",
)
EXCEPTION_STACKTRACE: Final = _attribute(
    exception_attributes.EXCEPTION_STACKTRACE, str, (EXCEPTION,), "with exception.message"
)
INTERRUPTED: Final = _attribute(
    "tunix.interrupted",
    str,
    _CALLS,
    "KeyboardInterrupt, SystemExit or a cancellation passed the span: its class name",
)
PROCESS_INDEX: Final = _attribute(
    "tunix.jax.process.index",
    int,
    (*_SPANS, _GAUGES, *_EVENTS, *_INSTRUMENTS),
    "more than one process may emit: which one this is",
)
LIBRARY_NAME: Final = _attribute(
    "tunix.library.name", str, _RUN, "the distribution that is instrumented, where it is known"
)
LIBRARY_VERSION: Final = _attribute(
    "tunix.library.version", str, _RUN, "its version, where it is known"
)
JAX_VERSION: Final = _attribute("tunix.jax.version", str, _RUN, "always")
RUN_MODEL: Final = _attribute("tunix.model.class", str, _RUN, "the class of the trained model")
RUN_PARAMETERS: Final = _attribute(
    "tunix.model.parameters", int, _RUN, "how many numbers the model has, adapters included"
)
RUN_TRAINABLE: Final = _attribute(
    "tunix.model.parameters.trainable", int, _RUN, "how many of them the optimizer updates"
)
RUN_ADAPTATION: Final = _attribute(
    "tunix.training.adaptation", str, _RUN, "lora where the model has LoRA parameters, else full"
)
RUN_MESH_SHAPE: Final = _attribute(
    "tunix.mesh.shape", list, _RUN, "axes of the model's mesh as name=size, where it is sharded"
)
RUN_DEVICE_KIND: Final = _attribute(
    "tunix.device.kind", str, _RUN, "what the model's devices are, in JAX's words"
)
RUN_DEVICE_COUNT: Final = _attribute(
    "tunix.device.count", int, _RUN, "how many devices hold the model"
)
RUN_BATCH_SHAPE: Final = _attribute(
    "tunix.training.batch.shape", list, (RUN,), "shape of the first array of the first micro-batch"
)
RUN_MAX_STEPS: Final = _attribute(
    "tunix.training.max_steps", int, _RUN, "updates after which the run ends, where it is set"
)
RUN_ACCUMULATION: Final = _attribute(
    "tunix.training.gradient_accumulation_steps", int, _RUN, "micro-batches of an update"
)
RUN_RESUMED_FROM: Final = _attribute(
    "tunix.training.resumed_from",
    int,
    _RUN,
    "updates done before, where a checkpoint was restored",
)

TRAINING_MODE: Final = _attribute(
    "tunix.training.mode", str, (_GAUGES, STEP_COMPLETED), "always: train, eval or what was logged"
)
METRICS_PREFIX: Final = _attribute(
    "tunix.metrics.prefix", str, (_GAUGES, STEP_COMPLETED), "the library logged with a prefix"
)
METRICS_NAME: Final = _attribute(
    "tunix.metrics.name", str, (_GAUGES,), "the key as it was logged, unless it is a well-known one"
)
NONFINITE: Final = _attribute(
    "tunix.training.nonfinite", list, (STEP_COMPLETED,), "keys whose value was NaN or infinite"
)
LATE: Final = _attribute(
    "tunix.training.step.late", bool, (STEP_COMPLETED,), "an event of this step went out before"
)

# Gauges (scope tunix; the facade's set, see _gauges.py for how values and names are treated) ----

_LOGGED: Final = "the library logged it"
TRAINING_LOSS: Final = _metric("tunix.training.loss", "gauge", "1", _LOGGED)
TRAINING_PERPLEXITY: Final = _metric("tunix.training.perplexity", "gauge", "1", _LOGGED)
TRAINING_LEARNING_RATE: Final = _metric("tunix.training.learning_rate", "gauge", "1", _LOGGED)
TRAINING_GRADIENT_NORM: Final = _metric("tunix.training.gradient.norm", "gauge", "1", _LOGGED)
TRAINING_STEP_GAUGE: Final = _metric("tunix.training.step", "gauge", "{step}", _LOGGED)
TRAINING_NONFINITE: Final = _metric(
    "tunix.training.nonfinite", "counter", "{value}", "a logged number was NaN or infinite"
)
