# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What every rank says of the tensors that it gathers, and the tensors along with it where there is room."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import gather


# How many numbers stand before the data. Those that are more go with the data.
_HEADER = 16
_INTEGER = torch.int64.itemsize
# Tensors lie in a message at multiples of this many bytes.
_ALIGNMENT = 16
# How much data of all ranks together is sent along. With more, the time of a message of its own does not show.
_MOST_BYTES = 2**26


class _Room:
    """
    How many bytes of data to send along with the header, so that it need not be a message of its own.

    All ranks have to send equally much, and none knows what the others have. What all of them know is what they had in
    the calls before. Loops repeat themselves, so expected is what has last followed on a call like the last one.
    """

    _of_group: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    @classmethod
    def current(cls) -> _Room:
        world = dist.group.WORLD
        if world is None:  # ranks that are joined by something else, as those on TPUs
            return cls()
        if world not in cls._of_group:
            cls._of_group[world] = cls()
        return cls._of_group[world]

    def __init__(self):
        self.size = 0
        self._last = 0
        self._followers: dict[int, int] = {}

    def note(self, size: int) -> None:
        # A little more, so that it need not be exactly as much again.
        size = _aligned(size, max(_ALIGNMENT, 2 ** max(0, size.bit_length() - 7)))
        self._followers[self._last] = size
        self._last = size.bit_length()
        self.size = self._followers.get(self._last, size)


def exchange(
    structure: str, numbers: list[int], tensors: list[torch.Tensor]
) -> tuple[list[list[int]], list[torch.Tensor] | None]:
    """
    Gather some numbers from all ranks, and with them the bytes of tensors if there is room for those of each rank.

    Args:
        structure (`str`): What is the same on all ranks where equally many numbers and alike tensors are.
        numbers (`list[int]`): The numbers.
        tensors (`list[torch.Tensor]`): The tensors. The numbers must tell their shapes.

    Returns:
        `tuple[list[list[int]], list[torch.Tensor] | None]`: The numbers of each rank, and its bytes for [`unpack`];
        `None` if the tensors are still to be gathered.

    Raises:
        `ValueError`: The structure differs between ranks. The same on all ranks.
    """
    state, room = PartialState(), _Room.current()
    first, rest = numbers[: _HEADER - 2], torch.tensor(numbers[_HEADER - 2 :], dtype=torch.int64, device=state.device)
    need = -1
    if all(_can_be_copied(tensor, state.device) for tensor in tensors):
        need = sum(_aligned(part.nbytes) for part in (rest, *tensors))
        need = -1 if need * state.num_processes > _MOST_BYTES else need
    header = [zlib.crc32(structure.encode()), need, *first]
    message = torch.empty(_HEADER + room.size // _INTEGER, dtype=torch.int64, device=state.device)
    message[:_HEADER] = torch.tensor(header + [0] * (_HEADER - len(header)))
    if 0 <= need <= room.size:
        begin, place = 0, message[_HEADER:].view(torch.uint8)
        for part in (rest, *tensors):
            _part(place, begin, part.dtype, part.shape).copy_(part.detach())
            begin += _aligned(part.nbytes)
    messages = _gather(message, state)
    rows = messages[:, :_HEADER].tolist()
    for rank, row in enumerate(rows):
        if row[0] != rows[0][0]:
            raise ValueError(
                f"Rank {rank} gathers another structure than rank 0. Gather the same nesting of tensors, with the same "
                f"dtypes and numbers of dimensions, on every rank. On rank {state.process_index} it is {structure}."
            )
    needs = [row[1] for row in rows]
    came_along = min(needs) >= 0 and max(needs) <= room.size
    room.note(max(needs) if min(needs) >= 0 else 0)
    rows = [row[2 : 2 + len(first)] for row in rows]
    if len(rest):
        found = messages[:, _HEADER : _HEADER + len(rest)] if came_along else gather(rest[None])
        rows = [row + more for row, more in zip(rows, found.tolist())]
    if not came_along:
        return rows, None
    begin = _HEADER + _aligned(rest.nbytes) // _INTEGER
    return rows, [of_rank.view(torch.uint8) for of_rank in messages[:, begin:]]


def _gather(message: torch.Tensor, state: PartialState) -> torch.Tensor:
    if state.backend != "gloo":
        return gather(message).view(state.num_processes, -1)
    # Accelerate would put the messages together in one more copy.
    messages = message.new_empty((state.num_processes, len(message)))
    dist.all_gather(list(messages), message)
    return messages


def unpack(
    data: list[torch.Tensor], tensors: list[torch.Tensor], shapes: list[list[list[int]]]
) -> list[list[torch.Tensor]]:
    """
    Take the tensors of each rank out of what has come along with its numbers.

    Args:
        data (`list[torch.Tensor]`): What [`exchange`] has returned, one of each rank.
        tensors (`list[torch.Tensor]`): This rank's tensors. Those of the others have the same dtypes.
        shapes (`list[list[list[int]]]`): Of each tensor the shape on each rank.

    Returns:
        `list[list[torch.Tensor]]`: Each of the tensors from each rank. They share the memory of `data`.
    """
    begins, unpacked = [0] * len(data), []
    for tensor, shapes_of_one in zip(tensors, shapes):
        unpacked.append(
            [_part(block, begin, tensor.dtype, shape) for block, begin, shape in zip(data, begins, shapes_of_one)]
        )
        begins = [begin + _aligned(part.nbytes) for begin, part in zip(begins, unpacked[-1])]
    return unpacked


def _part(block: torch.Tensor, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return block[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _aligned(size: int, unit: int = _ALIGNMENT) -> int:
    return -(-size // unit) * unit


def _can_be_copied(tensor: torch.Tensor, device: torch.device) -> bool:
    # What cannot is left to Accelerate, with whatever it makes of it.
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == device.type
    return is_plain and type(tensor) in (torch.Tensor, torch.nn.Parameter) and device.type != "xla"
