# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What can be told of a batch: how many samples it holds, and how much memory it takes."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sized
from numbers import Number
from typing import Any

import numpy
import torch


_MOST_PARTS = 100


def size_of(batch: Any) -> int | None:
    """
    Count the samples in a batch: the first dimension of its first tensor, or else the length of the list that it is.

    Args:
        batch (`Any`): What a loader yields: a tensor or any nesting of tensors, lists, dictionaries and objects.

    Returns:
        `int` or `None`: `None` if nothing in it has a length.
    """
    if isinstance(batch, torch.Tensor):
        shape = batch.shape
        return shape[0] if shape else None
    tensor = _first_tensor(batch)
    if tensor is not None:
        return tensor.shape[0]
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), None)
    if isinstance(batch, (torch.Tensor, str, bytes, Mapping)) or not isinstance(batch, Sized):
        return None
    return len(batch)


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(batch, (Mapping, list, tuple)):
        return None
    return next((tensor for tensor in map(_first_tensor, parts) if tensor is not None), None)


def weight_of(batch: Any) -> float:
    """
    Add up the memory that the tensors, arrays, strings and numbers in a batch take.

    Args:
        batch (`Any`): What a loader yields: a tensor or any nesting of tensors, lists, dictionaries and objects.

    Returns:
        `float`: Roughly how many bytes; infinity if there is anything else in it, or too much to look at.
    """
    if type(batch) is torch.Tensor:
        return _bytes_of(batch)
    total, parts = 0, [batch]
    for number, part in enumerate(parts):  # grows while it is gone through
        if isinstance(part, (torch.Tensor, numpy.ndarray)):
            total += _bytes_of(part)
        elif isinstance(part, (str, bytes)):
            total += sys.getsizeof(part)
        elif isinstance(part, Number) or part is None:
            total += 8
        elif isinstance(part, (Mapping, list, tuple)) and number + len(part) < _MOST_PARTS:
            parts.extend(part.values() if isinstance(part, Mapping) else part)
        else:
            return math.inf
    return total


def _bytes_of(array: torch.Tensor | numpy.ndarray) -> float:
    if isinstance(array, numpy.ndarray) and array.dtype.hasobject:
        return math.inf
    try:
        return array.nbytes
    except Exception:
        # A sparse tensor does not say, and a tensor of another kind may not either.
        return math.inf
