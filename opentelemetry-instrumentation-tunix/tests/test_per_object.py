# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""Values kept beside objects: by identity, and no longer than the objects live."""

from __future__ import annotations

import gc

from opentelemetry.instrumentation.tunix.per_object import PerObject


class Same:
    """Equal to every other one, and without a hash."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return True


def test_equal_objects_without_a_hash_are_told_apart() -> None:
    """Identity counts, not equality."""
    values: PerObject[int] = PerObject()
    first, second = Same(), Same()
    values.set(first, lambda before: 1 if before is None else before)
    assert values.get(second) is None
    values.set(second, lambda before: 2 if before is None else before)
    assert (values.get(first), values.get(second)) == (1, 2)


def test_a_value_is_made_from_the_one_before() -> None:
    """Whoever sets sees what is there."""
    values: PerObject[int] = PerObject()
    subject = Same()
    values.set(subject, lambda _: 1)
    assert values.set(subject, lambda before: (before or 0) + 1) == 2
    assert values.values() == [2]


def test_a_value_goes_with_its_object() -> None:
    """And the owner is told."""
    gone: list[int] = []
    values: PerObject[int] = PerObject(gone.append)
    subject = Same()
    values.set(subject, lambda _: 7)
    del subject
    gc.collect()
    assert gone == [7]
    assert len(values) == 0


def test_an_object_that_takes_no_weak_reference_keeps_its_value() -> None:
    """Its identity would be reused if it could go."""

    class Slotted:
        __slots__ = ()

    values: PerObject[int] = PerObject()
    subject = Slotted()
    values.set(subject, lambda _: 1)
    assert values.set(subject, lambda before: before) == 1
    assert values.get(subject) == 1
