# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Model families: decoders and their checkpoints."""
