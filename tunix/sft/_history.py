# SPDX-FileCopyrightText: Copyright The tunix-opentelemetry Authors
# SPDX-License-Identifier: Apache-2.0
"""The values of one metric and their running mean."""

from __future__ import annotations

import math
from array import array
from typing import Final, NamedTuple, Self

import numpy as np

from tunix.sft._series import Series


class History:
    """Values in log order, 8 bytes each, and their mean without reading them again.

    `add` may run in many threads at once, also while the others run: an append is atomic under the
    GIL, and the running sum is replaced as a whole. The other methods need the stream's lock.

    What is no float64 (text, an array, an integer beyond 2**53) is kept beside the numbers, which
    have NaN in its place.
    """

    __slots__ = ("_numbers", "_object_sum", "_objects", "_skipped", "_sum")

    def __init__(self) -> None:
        self._numbers = array("d")
        self._objects: dict[int, object] = {}
        self._sum = _Sum(0, 0.0, 0)
        self._object_sum = 0.0
        self._skipped = 0  # objects that are no numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: float) -> None:
        """Appends a number."""
        numbers = self._numbers
        numbers.append(number)
        if not len(numbers) & _EVERY:
            self._sum_up()

    def add_object(self, kept: object, number: float | None) -> None:
        """Appends anything; `number` is what it counts as in the mean, None for not at all."""
        index = len(self._numbers)
        self._numbers.append(math.nan)
        # A number added by another thread in this moment may have come first. If it is NaN too,
        # nobody can tell which was logged first.
        while not math.isnan(self._numbers[index]):
            index += 1
        self._objects[index] = kept
        if number is None:
            self._skipped += 1
        else:
            self._object_sum += self._term(number)

    def mean(self) -> np.float64:
        """Mean of the numbers; NaN where there is none, or where one of them is NaN."""
        done = self._sum_up()
        count = done.count - self._skipped
        if not count or done.nans > len(self._objects):
            return np.float64(math.nan)
        return np.float64(self._from_terms((done.total + self._object_sum) / count))

    def values(self) -> np.ndarray:
        """A copy of shape [n]: float64, or object where something else was logged."""
        # Sliced before numpy sees it: an array whose memory is shared cannot grow.
        numbers = np.frombuffer(self._numbers[:], np.float64)
        if not self._objects:
            return numbers
        values = numbers.astype(object)
        for index, kept in self._objects.items():
            values[index] = kept
        return values

    def copy(self) -> Self:
        """An independent history with the same values."""
        new = type(self)()
        new._numbers = self._numbers[:]
        new._objects = self._objects.copy()
        new._object_sum = self._object_sum
        new._skipped = self._skipped
        return new

    def _sum_up(self) -> _Sum:
        """Brings the running sum up to date; at most 1,024 numbers are behind.

        Derived from the last sum and the numbers alone, so it does not matter which of two threads
        that do this at once comes last.
        """
        done = self._sum
        numbers = self._numbers[done.count :]
        if numbers:
            nans = sum(map(math.isnan, numbers))
            terms = [n for n in numbers if not math.isnan(n)] if nans else numbers
            total = done.total + sum(map(self._term, terms))
            self._sum = done = _Sum(done.count + len(numbers), total, done.nans + nans)
        return done

    @staticmethod
    def _term(number: float) -> float:
        return number

    @staticmethod
    def _from_terms(mean: float) -> float:
        return mean


class GeometricHistory(History):
    """A history whose mean is geometric: exp of the mean of logarithms."""

    __slots__ = ()

    @staticmethod
    def _term(number: float) -> float:
        if number > 0.0:
            return math.log(number)
        return -math.inf if number == 0.0 else math.nan

    @staticmethod
    def _from_terms(mean: float) -> float:
        try:
            return math.exp(mean)
        except OverflowError:  # rounding, next to the largest float64
            return math.inf


class _Sum(NamedTuple):
    count: int  # numbers and placeholders taken in
    total: float  # of what is not NaN
    nans: int  # numbers that are NaN, and placeholders


_EVERY: Final = 1023


def new_history(series: Series) -> History:
    """The store of a series: a mean of perplexities is the perplexity of the mean loss."""
    return GeometricHistory() if series.name == "perplexity" else History()
