# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Each real sample once: what every rank has made of its batch, put together without replays and without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from accelerate.state import PartialState
from accelerate.utils import gather, gather_object

from .messages import exchange, unpack


class Count(NamedTuple):
    """
    How many samples a rank has in the current step.

    Args:
        size (`int`, *optional*):
            The samples in its batch; `None` where a step is one sample, or something that has no length, and counts as
            a whole.
        real (`int`): How many of them are real. They come first; the others are padding, or a replay.
        full (`int`, *optional*): The samples in a batch that is not cut short, where the loader has such a number.
    """

    size: int | None
    real: int
    full: int | None = None


def gather_real(data: Any, count: Count, use_gather_object: bool = False) -> Any:
    """
    Gather data from all ranks, in rank order, and leave out what does not come from real samples.

    A tensor, or a list without tensors, has one entry for each sample if its length is that of the batch on every
    rank, or that of a full batch: some loops, the one of transformers' `Trainer` among them, repeat the loss of a last
    batch as often as for a full one. Of such leaves the real entries are kept. All others are gathered whole.

    Args:
        data (`Any`):
            A tensor, an object, or any nesting of lists, tuples, named tuples and mappings of them, of the same
            structure on every rank.
        count ([`Count`]): The samples of this rank's step.
        use_gather_object (`bool`, *optional*, defaults to `False`):
            Whether to send tensors as objects, for those that cannot be concatenated. They come back as a list.

    Returns:
        `Any`: The same structure. Tensors are concatenated, lists joined, and single objects put into a list.

    Raises:
        `ValueError`: The structure, or a dimension other than the first, differs between ranks. The same on all ranks.
    """
    if PartialState().num_processes == 1:
        return data
    leaves: list[Any] = []
    rebuild = _take_apart(data, leaves, use_gather_object)
    are_tensors = [isinstance(leaf, torch.Tensor) and not use_gather_object for leaf in leaves]
    tensors = [leaf for leaf, is_tensor in zip(leaves, are_tensors) if is_tensor]
    objects = [leaf for leaf, is_tensor in zip(leaves, are_tensors) if not is_tensor]
    numbers = [*(-1 if number is None else number for number in count), *(n for each in tensors for n in each.shape)]
    rows, data = exchange(rebuild.text, numbers, tensors)
    counts = [Count(*(None if number < 0 else number for number in row[: len(count)])) for row in rows]
    shapes = _shapes_of_all(tensors, [row[len(count) :] for row in rows])
    values = [None] * len(tensors) if data is None else unpack(data, tensors, shapes)
    gathered = {
        True: iter([_gather_tensor(*each, counts) for each in zip(tensors, shapes, values)]),
        False: iter(_gather_objects(objects, counts)),
    }
    return rebuild.make(iter([next(gathered[is_tensor]) for is_tensor in are_tensors]))


class _Structure(NamedTuple):
    """How to put a structure together again from its leaves, and a text that is the same for the same structure."""

    make: Callable[[Iterator[Any]], Any]
    text: str


def _take_apart(data: Any, leaves: list[Any], as_objects: bool) -> _Structure:
    # What holds no tensor is one leaf, however deep: it travels as an object and is merged when all of it is there.
    is_tensor = isinstance(data, torch.Tensor) and not as_objects
    if is_tensor or as_objects or not _holds_tensor(data):
        leaves.append(data)
        return _Structure(next, f"{data.dtype}/{data.ndim}" if is_tensor else "object")
    if isinstance(data, Mapping):
        parts = {key: _take_apart(value, leaves, as_objects) for key, value in data.items()}
        return _Structure(
            lambda found: _like(data, {key: part.make(found) for key, part in parts.items()}),
            "{" + ",".join(f"{key!r}:{part.text}" for key, part in parts.items()) + "}",
        )
    inner = [_take_apart(value, leaves, as_objects) for value in data]
    return _Structure(
        lambda found: _like(data, [part.make(found) for part in inner]),
        "[" + ",".join(part.text for part in inner) + "]",
    )


def _like(data: Any, parts: Any) -> Any:
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)


def _holds_tensor(data: Any) -> bool:
    if isinstance(data, Mapping):
        data = data.values()
    elif not isinstance(data, (list, tuple)):
        return isinstance(data, torch.Tensor)
    return any(_holds_tensor(value) for value in data)


def _shapes_of_all(tensors: list[torch.Tensor], rows: list[list[int]]) -> list[list[list[int]]]:
    shapes, position = [], 0
    for tensor in tensors:
        shapes.append([row[position : position + tensor.ndim] for row in rows])
        position += tensor.ndim
    return shapes


def _gather_tensor(
    tensor: torch.Tensor, shapes: list[list[int]], values: list[torch.Tensor] | None, counts: list[Count]
) -> torch.Tensor:
    """Put together what all ranks have of one tensor, from their values where those are here already."""
    lengths = [shape[0] if shape else 1 for shape in shapes]
    kept = _kept([shape[0] if shape else None for shape in shapes], counts, whole=lengths)
    for rank, shape in enumerate(shapes):
        if shape[1:] != shapes[0][1:]:
            raise ValueError(
                f"Rank {rank} gathers a tensor of shape {tuple(shape)} and rank 0 one of shape {tuple(shapes[0])}, "
                "which cannot be concatenated. Bring them to one size with `accelerator.pad_across_processes(tensor, "
                "dim=1)`, or pass `use_gather_object=True`."
            )
    if values is not None:
        return torch.cat(
            [(value if shape else value[None])[:number] for value, shape, number in zip(values, shapes, kept)]
        )
    if not tensor.ndim:
        tensor = tensor[None]
    if kept == lengths and len(set(lengths)) == 1:
        return _gather_alike(tensor)
    own, most = kept[PartialState().process_index], max(kept)
    padded = tensor.new_zeros((most, *tensor.shape[1:]))
    padded[:own] = tensor[:own]
    blocks = _gather_alike(padded).view(len(kept), most, *tensor.shape[1:])
    return torch.cat([block[:number] for block, number in zip(blocks, kept)])


def _gather_alike(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel():
        return gather(tensor)
    return tensor.new_empty((len(tensor) * PartialState().num_processes, *tensor.shape[1:]))


def _gather_objects(objects: list[Any], counts: list[Count]) -> list[Any]:
    return [_merge(leaf, counts) for leaf in zip(*gather_object([objects]))] if objects else []


def _merge(values: tuple, counts: list[Count]) -> Any:
    """Merge the values of one leaf, or of a structure without tensors, one of each rank."""
    first = values[0]
    if isinstance(first, Mapping) and all(_same(first, value) and list(first) == list(value) for value in values):
        return _like(first, {key: _merge(tuple(value[key] for value in values), counts) for key in first})
    lengths = [_length(value) for value in values]
    by_sample = all(count.size == length for count, length in zip(counts, lengths))
    is_tuple = isinstance(first, tuple) and (hasattr(first, "_fields") or not first or any(map(_is_container, first)))
    is_nested = isinstance(first, list) and not by_sample and any(_is_container(part) for part in first)
    if (is_tuple or is_nested) and all(_same(first, value) and len(first) == len(value) for value in values):
        return _like(first, [_merge(parts, counts) for parts in zip(*values)])
    entries = [[value] if length is None else list(value) for value, length in zip(values, lengths)]
    kept = _kept(lengths, counts, whole=[len(part) for part in entries])
    return [entry for part, number in zip(entries, kept) for entry in part[:number]]


def _same(first: Any, other: Any) -> bool:
    return type(first) is type(other)


def _is_container(data: Any) -> bool:
    return isinstance(data, (Mapping, list, tuple))


def _length(data: Any) -> int | None:
    if isinstance(data, torch.Tensor):
        return len(data) if data.ndim else None
    return len(data) if isinstance(data, (list, tuple)) else None


def _kept(lengths: list[int | None], counts: list[Count], whole: list[int]) -> list[int]:
    """Tell how many entries of a leaf to keep from each rank."""
    if all(count.size is not None for count in counts):
        by_batch = all(length == count.size for length, count in zip(lengths, counts))
        by_sample = by_batch or all(length and length == count.full for length, count in zip(lengths, counts))
        return [count.real for count in counts] if by_sample else whole
    return [length if count.real else 0 for length, count in zip(whole, counts)]
