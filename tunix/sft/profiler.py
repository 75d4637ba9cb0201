# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""A window of steps recorded by JAX's profiler."""

from __future__ import annotations

import dataclasses
import logging
import threading
from typing import ClassVar

import jax

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ProfilerOptions:
    """Which steps are recorded, and how.

    Attributes:
        log_dir: Where the profile is written.
        skip_first_n_steps: Micro-batches before the window.
        profiler_steps: Micro-batches in it.
        set_profile_options: Whether the two levels below count, or JAX's own defaults.
        host_tracer_level: How much of the host is recorded, 0 to 3.
        python_tracer_level: Whether Python calls are recorded, 0 or 1.
    """

    log_dir: str
    skip_first_n_steps: int
    profiler_steps: int
    set_profile_options: bool = True
    host_tracer_level: int = 2
    python_tracer_level: int = 1

    def __post_init__(self) -> None:
        """Checks the window.

        Raises:
            ValueError: It is empty, or begins before the first step.
        """
        if self.skip_first_n_steps < 0:
            raise ValueError(f"skip_first_n_steps must be 0 or more, got {self.skip_first_n_steps}")
        if self.profiler_steps < 1:
            raise ValueError(f"profiler_steps must be 1 or more, got {self.profiler_steps}")


class Profiler:
    """Starts and ends the profile of a training loop; process 0 alone records.

    JAX records one profile at a time. Where one is being recorded already, by the application or by
    another trainer, this one gives way.

    Args:
        initial_step: Micro-batches that were done before.
        max_step: Micro-batches after which training ends; None where that is open.
        profiler_options: None to record nothing.

    Raises:
        ValueError: Training ends before the window begins.
    """

    _one_at_a_time: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, initial_step: int, max_step: int | None, profiler_options: ProfilerOptions | None
    ) -> None:
        self._options = profiler_options
        self._recording = False
        if profiler_options is None:
            return
        self._first = initial_step + profiler_options.skip_first_n_steps
        self._last = self._first + profiler_options.profiler_steps
        if max_step is not None:
            self._last = min(self._last, max_step)
        if self._last <= self._first:
            raise ValueError(
                f"The profile would begin after {self._first} micro-batches and training ends "
                f"after {max_step}: lower skip_first_n_steps, "
                f"{profiler_options.skip_first_n_steps}."
            )

    def maybe_activate(self, step: int) -> None:
        """Starts the profile where the window begins after `step` micro-batches."""
        options = self._options
        if options is None or step != self._first or jax.process_index() != 0:
            return
        if not self._one_at_a_time.acquire(blocking=False):
            _log.warning("Another trainer is being profiled: no profile of this one.")
            return
        try:
            if options.set_profile_options:
                settings = jax.profiler.ProfileOptions()
                settings.host_tracer_level = options.host_tracer_level
                settings.python_tracer_level = options.python_tracer_level
                jax.profiler.start_trace(options.log_dir, profiler_options=settings)
            else:
                jax.profiler.start_trace(options.log_dir)
            self._recording = True
        except RuntimeError as error:  # the application records one itself
            _log.warning("No profile of this trainer: %s", error)
        finally:
            if not self._recording:
                self._one_at_a_time.release()

    def maybe_deactivate(self, step: int) -> None:
        """Ends the profile where the window ends after `step` micro-batches."""
        if self._options is not None and step >= self._last:
            self.stop()

    def stop(self) -> None:
        """Ends the profile if one is being recorded, and writes it."""
        if self._recording:
            self._recording = False
            try:
                jax.profiler.stop_trace()
            finally:
                self._one_at_a_time.release()
