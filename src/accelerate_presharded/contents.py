# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What a batch holds: its samples, one by one, and a number that tells one sample from another by its content."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import struct
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy
import torch

from .batches import size_of
from .counting import draws_single_items
from .sharding import read


class Cutter:
    """
    Cuts the batches of one loader into samples.

    A batch is cut along the first dimension of its tensors and arrays, a list of samples into its elements. What a
    loader with `batch_size=None` yields is one sample.

    Args:
        loader (`torch.utils.data.DataLoader` or any iterable of batches):
            The loader as the user has built it.

    **Available attributes:**

        - **single** (`bool`) -- Whether what the loader yields is one sample.
        - **uncut** (`str`, *optional*) -- The class of a batch that could not be cut and counts as one sample.
    """

    def __init__(self, loader: Any):
        self.uncut: str | None = None
        self.single = draws_single_items(loader)
        batch_size = read(loader, "batch_size") or read(read(loader, "batch_sampler"), "batch_size")
        self._batch_size = batch_size if isinstance(batch_size, int) else None
        self._are_elements: bool | None = None

    def cut(self, batch: Any) -> list[Any]:
        """
        Cut a batch.

        Args:
            batch (`Any`): What the loader has yielded.

        Returns:
            `list`: Its samples, in order.
        """
        if self.single:
            return [batch]
        if _is_list(batch):
            # The first batch is full, and decides for the last one, which may not be.
            if self._are_elements is None and len(batch):
                self._are_elements = self._is_list_of_samples(batch)
            if self._are_elements or not batch:
                return list(batch)
            length = _common_length(batch[0])
            if length is not None:
                return [[_part(column, index, length) for column in batch] for index in range(length)]
        size = _size_of(batch)
        if size is None:
            self.uncut = type(batch).__name__
            return [batch]
        return [_part(batch, index, size) for index in range(size)]

    def _is_list_of_samples(self, batch: list | tuple) -> bool:
        """Tell a list of samples from a list of columns, such as the inputs and the labels."""
        lengths = {_common_length(part) for part in batch}
        if len(lengths) != 1 or None in lengths:
            return True
        if self._batch_size in lengths:
            return False
        return len(batch) == self._batch_size or not any(_holds_array(part) for part in batch)


def hash_of(sample: Any, key: str | int | Callable[[Any], Any] | None = None) -> int:
    """
    Return a number that is the same for samples with the same content, in every process.

    Numbers, strings, bytes, tensors, arrays and any nesting of lists, mappings, sets, dataclasses and plain objects are
    told apart by value; lists from tuples, one kind of mapping from another, and the device of a tensor are not.

    Args:
        sample (`Any`): The sample.
        key (`str`, `int` or `Callable`, *optional*):
            What to tell it by instead of all its content: a field, an index, or what a function makes of it.

    Returns:
        `int`: 64 bits. In a hundred million samples, two different ones have the same number with a probability of
        less than one in a thousand.

    Raises:
        `ValueError`: The sample has no such field, or holds something that has no content to go by.
    """
    if callable(key):
        sample = key(sample)
    elif key is not None:
        sample = _field(sample, key)
    digest = hashlib.blake2b(digest_size=8)
    try:
        _feed(digest.update, sample)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"A sample of class {type(sample).__name__} cannot be told from another by its content "
            f"({type(error).__name__}: {error}). Pass `key`, the name of a field that is different for each sample, or "
            "a function that returns such a value."
        ) from error
    return int.from_bytes(digest.digest(), "little")


def _field(sample: Any, key: str | int) -> Any:
    try:
        if isinstance(key, str) and not isinstance(sample, Mapping):
            return getattr(sample, key)
        return sample[key]
    except (AttributeError, LookupError, TypeError):
        fields = f"the fields {', '.join(map(repr, sample))}" if isinstance(sample, Mapping) else "no such field"
        raise ValueError(
            f"`key` is {key!r}, but a sample is a {type(sample).__name__} with {fields}. Pass the name or the index of "
            "a field, or a function that takes a sample."
        ) from None


def _feed(update: Callable[[bytes], Any], data: Any) -> None:
    """Hand over bytes from which the content could be rebuilt, so that no two contents give the same."""
    if isinstance(data, torch.Tensor):
        data = data.detach()
        if data.ndim == 0:
            return _feed(update, data.item())
        if data.layout != torch.strided:
            data = data.to_dense()
        shape = tuple(data.shape)
        name = str(data.dtype).removeprefix("torch.")
        # As bytes, because numpy does not know all of torch's types.
        content = data.cpu().contiguous().reshape(-1).view(torch.uint8).numpy() if data.numel() else b""
        return _feed_array(update, name, shape, content)
    if isinstance(data, numpy.generic):
        data = data.item()
    if isinstance(data, numpy.ndarray) and data.dtype != object:
        if data.ndim == 0:
            return _feed(update, data.item())
        return _feed_array(update, str(data.dtype), data.shape, numpy.ascontiguousarray(data).tobytes())
    if isinstance(data, numpy.ndarray):
        return _feed(update, data.tolist())
    if data is None or isinstance(data, (bool, int, complex)):
        return _feed_piece(update, b"n", repr(data).encode())
    if isinstance(data, float):
        return _feed_piece(update, b"f", struct.pack("<d", data))
    if isinstance(data, str):
        return _feed_piece(update, b"s", data.encode("utf-8", "surrogatepass"))
    if isinstance(data, (bytes, bytearray, memoryview)):
        return _feed_piece(update, b"b", bytes(data))
    if isinstance(data, Mapping):
        # In the order of their hashes: two mappings are the same in whatever order they were filled.
        pieces = sorted((hash_of(name).to_bytes(8, "little"), value) for name, value in _hashed_items(data))
        update(b"{%d:" % len(pieces))
        for name, value in pieces:
            update(name + value)
        return None
    if isinstance(data, Set):
        return _feed_piece(update, b"e", b"".join(sorted(hash_of(value).to_bytes(8, "little") for value in data)))
    if isinstance(data, (list, tuple)):
        update(b"[%d:" % len(data))
        for value in data:
            _feed(update, value)
        return None
    return _feed_object(update, data)


def _hashed_items(data: Mapping) -> list[tuple[Any, bytes]]:
    return [(name, hash_of(value).to_bytes(8, "little")) for name, value in data.items()]


def _feed_object(update: Callable[[bytes], Any], data: Any) -> None:
    if read(data, "__array_interface__") is not None:  # a picture of PIL's, for instance
        return _feed(update, numpy.asarray(data))
    update(f"o{type(data).__module__}.{type(data).__qualname__}:".encode())
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _feed(update, {field.name: getattr(data, field.name) for field in dataclasses.fields(data)})
    # Not `pickle`, where it can be helped: what it writes also depends on which parts are one and the same object.
    if type(data).__reduce_ex__ is object.__reduce_ex__ and getattr(data, "__dict__", None):
        return _feed(update, vars(data))
    return _feed_piece(update, b"p", pickle.dumps(data, protocol=4))


def _feed_array(update: Callable[[bytes], Any], dtype: str, shape: tuple, content: Any) -> None:
    update(f"a{dtype}{shape}:".encode())
    update(content)


def _feed_piece(update: Callable[[bytes], Any], kind: bytes, content: bytes) -> None:
    update(b"%b%d:" % (kind, len(content)))
    update(content)


def _is_list(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and not hasattr(data, "_fields")


def _is_array(data: Any) -> bool:
    return isinstance(data, (torch.Tensor, numpy.ndarray))


def _parts(data: Any) -> list[Any]:
    if isinstance(data, Mapping):
        return list(data.values())
    return list(data) if isinstance(data, (list, tuple)) else []


def _holds_array(data: Any) -> bool:
    return _is_array(data) or any(_holds_array(part) for part in _parts(data))


def _common_length(data: Any) -> int | None:
    """Return the length that all columns of something have, or `None` if it cannot consist of columns."""
    if _is_array(data):
        return data.shape[0] if data.ndim else None
    if isinstance(data, Mapping):
        lengths = {_common_length(part) for part in data.values()}
        return lengths.pop() if len(lengths) == 1 else None
    return len(data) if isinstance(data, (list, tuple)) else None


def _size_of(batch: Any) -> int | None:
    array = _first_array(batch)
    return size_of(batch) if array is None else array.shape[0]


def _first_array(data: Any) -> torch.Tensor | numpy.ndarray | None:
    if _is_array(data):
        return data if data.ndim else None
    return next((found for found in map(_first_array, _parts(data)) if found is not None), None)


def _part(data: Any, index: int, size: int) -> Any:
    """Take one sample's share: an entry of each column, and the whole of what is no column."""
    if _is_array(data):
        return data[index] if data.ndim and len(data) == size else data
    if isinstance(data, Mapping):
        return {name: _part(value, index, size) for name, value in data.items()}
    if not isinstance(data, (list, tuple)):
        return data
    if len(data) == size and not any(_holds_column(part, size) for part in data):
        return data[index]
    return [_part(value, index, size) for value in data]


def _holds_column(data: Any, size: int) -> bool:
    if _is_array(data):
        return data.ndim > 0 and len(data) == size
    return any(_holds_column(part, size) for part in _parts(data))
