# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The Llama family: Llama 3.x and what shares its architecture, such as SmolLM2."""
