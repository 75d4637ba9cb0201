# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""What this distribution instruments; equal to the extras of its pyproject.toml."""

_instruments: tuple[str, ...] = ()
_instruments_any = ("google-tunix >= 0.1.4.dev0", "tunix-core >= 0.1.0.dev0")
_supports_metrics = True
