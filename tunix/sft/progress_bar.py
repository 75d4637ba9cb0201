# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The progress bar of a training loop."""

from __future__ import annotations

import logging
import sys
from typing import Any

from tqdm import auto

from tunix.sft.metrics_logger import MetricsLogger, Mode

_log = logging.getLogger(__name__)
_ORDER = {"train": 0, "eval": 1}


class ProgressBar:
    """Steps done and the mean of chosen metrics, where somebody can see them.

    Without a terminal or a notebook nothing is drawn, and `metrics` is kept all the same. The bar
    shows what the logger knows already; it never waits for the device. It never raises either: a
    bar that cannot be drawn is no reason to stop a run.

    Args:
        metrics_prefix: Prefix of the metrics shown.
        metrics_logger: Where they are read: a `MetricsLogger`, or what has its `metric_exists`
            and `get_metric`.
        initial_steps: Steps done before.
        max_steps: Steps of the whole run.
        description: Text in front of the bar.

    Attributes:
        tqdm_bar: The tqdm bar.
        metrics: What is shown: `[<prefix>_]<mode>_<name>` to value, train before eval.
    """

    def __init__(
        self,
        metrics_prefix: str,
        metrics_logger: MetricsLogger,
        initial_steps: int,
        max_steps: int,
        description: str | None = None,
    ) -> None:
        self.metrics_prefix = metrics_prefix
        self.metrics_logger = metrics_logger
        self.metrics: dict[str, float] = {}
        self.tqdm_bar = auto.tqdm(
            total=max_steps,
            initial=initial_steps,
            desc=description,
            unit="step",
            dynamic_ncols=True,
            disable=not _somebody_watches(),
        )
        self._rank: dict[str, int] = {}
        self._closed = False

    def update_metrics(self, metric_names: list[str], mode: Mode | str, ndigits: int = 3) -> None:
        """Reads metrics of the logger; those that are not there yet keep what was shown.

        Args:
            metric_names: Names as they were logged.
            mode: The mode that they were logged in.
            ndigits: Decimals shown.
        """
        mode = str(getattr(mode, "value", mode))
        for name in metric_names:
            value = self._read(name, mode)
            if value is not None:
                label = "_".join(filter(None, (self.metrics_prefix, mode, name)))
                self.metrics[label] = round(float(value), ndigits)
                self._rank[label] = _ORDER.get(mode, len(_ORDER))
        self.metrics = dict(sorted(self.metrics.items(), key=lambda item: self._rank[item[0]]))

    def update(self, n: int = 1) -> None:
        """Moves on by `n` steps and draws the metrics; does nothing after `close`."""
        if self._closed:
            return
        try:
            self.tqdm_bar.set_postfix(self.metrics, refresh=False)
            self.tqdm_bar.update(n)
        except Exception:  # the terminal has gone
            self.close()

    def close(self) -> None:
        """Leaves the bar as it is; a second call changes nothing."""
        if not self._closed:
            self._closed = True
            try:
                self.tqdm_bar.close()
            except Exception:
                _log.debug("The progress bar could not be closed", exc_info=True)

    def _read(self, name: str, mode: str) -> Any:
        logger = self.metrics_logger
        try:
            if hasattr(logger, "peek_metric"):
                return logger.peek_metric(self.metrics_prefix, name, mode)
            if logger.metric_exists(self.metrics_prefix, name, mode):
                return logger.get_metric(self.metrics_prefix, name, mode)
        except Exception:
            _log.debug("Metric %r cannot be shown", name, exc_info=True)
        return None


def _somebody_watches() -> bool:
    try:
        return "ipykernel" in sys.modules or sys.stderr.isatty()
    except Exception:  # no stderr at all
        return False
