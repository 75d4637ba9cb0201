# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Environment variables that configure the instrumentation.

`opentelemetry-instrument` makes a command-line flag of every `OTEL_` name in this module.
"""

OTEL_INSTRUMENTATION_TUNIX_SPAN_GROUPS = "OTEL_INSTRUMENTATION_TUNIX_SPAN_GROUPS"
"""Comma-separated groups of spans to emit: run, train, eval, checkpoint,
compile. Default: all."""

OTEL_INSTRUMENTATION_TUNIX_TRACE_PER_STEP = "OTEL_INSTRUMENTATION_TUNIX_TRACE_PER_STEP"
"""Whether each step is a trace of its own (true) or a child of the run (false). Default: a trace of
its own unless a span of the application is active when the run begins."""

OTEL_INSTRUMENTATION_TUNIX_PROCESSES = "OTEL_INSTRUMENTATION_TUNIX_PROCESSES"
"""Which JAX processes emit: zero (the default), all, or errors (process 0 in full, the others only
spans that failed)."""

OTEL_INSTRUMENTATION_TUNIX_RUN_ID = "OTEL_INSTRUMENTATION_TUNIX_RUN_ID"
"""Identifies the run in `tunix.run.id`: one value for all processes and restarts of a job."""

OTEL_INSTRUMENTATION_TUNIX_STEP_EVENTS = "OTEL_INSTRUMENTATION_TUNIX_STEP_EVENTS"
"""Whether each step that the library logs is an event with all its numbers. Default: true."""

OTEL_INSTRUMENTATION_TUNIX_DEVICE_TIME = "OTEL_INSTRUMENTATION_TUNIX_DEVICE_TIME"
"""Whether threads wait for the end of device work, so that spans and metrics cover it. Default:
true."""
