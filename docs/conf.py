# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration."""

project = "tunix-opentelemetry"
author = "The tunix-opentelemetry Authors"
copyright = author  # noqa: A001 (the name that Sphinx reads)
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "requirements.txt"]
html_theme = "furo"
nitpicky = True
