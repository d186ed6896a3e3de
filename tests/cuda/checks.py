# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What has to be right where batches are on a GPU. Each check runs on every rank, and raises where something is not.

The expected values are worked out here, from the data, for two ranks (or four, where a check says so).
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from accelerate_presharded import Accelerator, DataLoaderConfiguration
from accelerate_presharded.channel import Channel


class Setting(NamedTuple):
    """
    Where a check runs.

    Args:
        device (`str`): `"cuda"` or `"cpu"`.
        backend (`str`): `"nccl"` with a GPU for each rank, or `"gloo"` with one device for all.
        folder (`str`): A folder for the ranks of all runs of this check.
        rank (`int`): The number of this rank.
    """

    device: str
    backend: str
    folder: str
    rank: int

    def accelerator(self, **settings: Any) -> Accelerator:
        """Make an `Accelerator` on ranks that are joined by this backend."""
        # Accelerate takes NCCL for GPUs, which refuses two ranks on one of them. What is initialized before would still
        # be taken for NCCL, so it has to be told.
        group = InitProcessGroupKwargs(backend=self.backend, timeout=timedelta(seconds=60))
        return Accelerator(cpu=self.device == "cpu", kwargs_handlers=[group], **settings)

    @property
    def place(self) -> torch.device:
        """Where the batches of this rank have to be."""
        if self.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", self.rank if self.backend == "nccl" else 0)


class Check(NamedTuple):
    """
    One check.

    Args:
        name (`str`): What holds if it passes.
        runs (`tuple[Callable, ...]`): What the ranks do. Each comes in new processes.
        num_ranks (`int`, *optional*, defaults to 2): On how many.
        lacks (`str`, *optional*): Why these versions of torch and accelerate cannot do that, if so.
    """

    name: str
    runs: tuple[Callable[[Setting], None], ...]
    num_ranks: int = 2
    lacks: str = ""


def same(what: str, found: Any, expected: Any) -> None:
    """Raise an error unless two values are equal."""
    if found == expected:
        return
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        number = next(number for number, pair in enumerate(zip(found, expected)) if pair[0] != pair[1])
        what, found, expected = f"{what}, at {number}", found[number], expected[number]
    raise AssertionError(f"{what}: found {reprlib.repr(found)}, expected {reprlib.repr(expected)}")


class Stream(IterableDataset):
    """Items of no known number, without a mark of any rank."""

    def __init__(self, items: Any):
        self.items = items

    def __iter__(self):
        return iter(self.items)


# ------------------------------------------------------------------------------------------------- where batches are


def on_the_device(setting: Setting) -> None:
    """What is nested in a batch too, and of a loader that Accelerate shards."""
    accelerator = setting.accelerator()
    same("backend", dist.get_backend(), setting.backend)
    same("device", accelerator.device.type, setting.device)
    same("ranks", accelerator.num_processes, 2)
    items = [{"x": float(item), "deeper": [torch.tensor([item])]} for item in range(16)]
    sampler = DistributedSampler(items, 2, setting.rank, shuffle=False)
    presharded = accelerator.prepare(DataLoader(items, batch_size=2, sampler=sampler))
    ordinary = accelerator.prepare(DataLoader(items, batch_size=2))
    # The sampler deals single items to the ranks, and Accelerate deals batches.
    batches = [[start, start + 1] for start in range(0, 16, 2)]
    dealt = {
        "presharded": [[start, start + 2] for start in range(setting.rank, 16, 4)],
        "ordinary": batches[setting.rank :: 2],
    }
    for name, loader in (("presharded", presharded), ("ordinary", ordinary)):
        found = []
        for batch in loader:
            same(f"where x is, {name}", batch["x"].device, setting.place)
            same(f"where the deeper tensor is, {name}", batch["deeper"][0].device, setting.place)
            same(
                f"what they hold, {name}", batch["x"].tolist(), [float(item) for item in batch["deeper"][0].flatten()]
            )
            found.append(batch["x"].tolist())
        same(name, found, dealt[name])


class _Noting(DataLoader):
    """Notes whether the batches of the user's own loader are pinned."""

    def __iter__(self):
        self.pinned = []
        for batch in super().__iter__():
            self.pinned.append(batch.is_pinned())
            yield batch


def pinned_and_non_blocking(setting: Setting) -> None:
    """The copy of a pinned batch is waited for by nobody, and still holds what it should."""
    on_cuda = setting.device == "cuda"
    configuration = DataLoaderConfiguration(non_blocking=True)
    accelerator = setting.accelerator(dataloader_config=configuration)
    numbers = range(100 * setting.rank, 100 * setting.rank + 12)
    length = 2**20 if on_cuda else 2**8
    loader = _Noting([torch.full((length,), float(number)) for number in numbers], batch_size=2, pin_memory=on_cuda)
    prepared = accelerator.prepare(loader, already_sharded=True)
    batches, was_busy = [], []
    iterator = iter(prepared)
    for _ in range(6):
        if on_cuda:
            torch.cuda._sleep(200_000_000)  # cycles, before which the copy cannot begin
        batch = next(iterator)
        if on_cuda:
            was_busy.append(not torch.cuda.current_stream().query())
        same("where the batch is", batch.device, setting.place)
        batches.append(batch)
    same("what is left", list(iterator), [])
    same("pinned", loader.pinned, [on_cuda] * 6)
    for number, batch in enumerate(batches):
        same("lowest of each", batch.min(dim=1).values.tolist(), [float(numbers[2 * number + i]) for i in (0, 1)])
        same("highest of each", batch.max(dim=1).values.tolist(), [float(numbers[2 * number + i]) for i in (0, 1)])
    # Memory for the first batches may have to be got from the device, which can take a wait. For the last one, nothing
    # may be left to copy.
    same("a batch came while the device was busy", any(was_busy[1:5]), on_cuda)


# ------------------------------------------------------------------------------------------------ uneven ranks, metrics

# Rank 0 has 5 items and rank 1 has 9, in batches of two: 3 and 5 batches.
ITEMS = [[0, 1, 2, 3, 4], [100, 101, 102, 103, 104, 105, 106, 107, 108]]
OWN = [[[0, 1], [2, 3], [4]], [[100, 101], [102, 103], [104, 105], [106, 107], [108]]]
EVENED = [[*OWN[0], [0, 1], [2, 3]], OWN[1]]
REAL = [[0, 1, 100, 101], [2, 3, 102, 103], [4, 104, 105], [106, 107], [108]]
LEARNING_RATE = 1 / 64


def _mean(batch: list[int]) -> float:
    return sum(batch) / len(batch)


# The gradient of each weight is the mean of the batch, averaged over the ranks.
TRAINED = -LEARNING_RATE * sum((_mean(first) + _mean(second)) / 2 for first, second in zip(*EVENED))
# A rank that has no more batches adds nothing.
JOINED = -LEARNING_RATE * sum(map(_mean, OWN[0] + OWN[1])) / 2


def _samples(rank: int) -> list[torch.Tensor]:
    return [torch.tensor([float(item)]) for item in ITEMS[rank]]


def _model() -> torch.nn.Module:
    model = torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model


def _weights(model: torch.nn.Module) -> list[float]:
    (weight,) = model.parameters()
    weight = weight.detach()
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).flatten().tolist()


def _train(setting: Setting, accelerator: Accelerator, loader: DataLoader, model, optimizer) -> list[tuple]:
    steps = []
    for batch in loader:
        same("where the batch is", batch.device, setting.place)
        with accelerator.accumulate(model):
            accelerator.backward(2 * model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        own = [int(item) for item in batch.flatten().tolist()]
        steps.append((own, accelerator.gradient_state.end_of_dataloader, accelerator.sync_gradients))
    return steps


def _check_training(setting: Setting, dataset: Any, every: int = 1, **settings: Any) -> None:
    accelerator = setting.accelerator(gradient_accumulation_steps=every, **settings)
    same("backend", dist.get_backend(), setting.backend)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(dataset, batch_size=2), already_sharded=True
    )
    steps = _train(setting, accelerator, loader, model, optimizer)
    last = [number == 4 for number in range(5)]
    synced = [(number + 1) % every == 0 or number == 4 for number in range(5)]
    same("steps", steps, list(zip(EVENED[setting.rank], last, synced)))
    same("weights", _weights(model), [TRAINED / every] * 2)
    gathered = [accelerator.gather_for_metrics(batch).flatten().tolist() for batch in loader]
    same("gathered", gathered, REAL)


def uneven_shards(setting: Setting) -> None:
    """Lists of different lengths, with gradient accumulation: nothing is sent while they are iterated."""
    _check_training(setting, _samples(setting.rank), every=2)


def uneven_streams(setting: Setting) -> None:
    """Streams, whose ranks speak over a gloo group of their own."""
    _check_training(setting, Stream(_samples(setting.rank)))
    same("backend of the own group", dist.get_backend(Channel.current().group), "gloo")
    same("backend of the group that trains", dist.get_backend(), setting.backend)


def long_streams(setting: Setting) -> None:
    """Steps so short and so many that ranks may speak of several at once."""
    accelerator = setting.accelerator()
    lengths = [700, 500]
    items = range(1000 * setting.rank, 1000 * setting.rank + lengths[setting.rank])
    loader = accelerator.prepare(DataLoader(Stream(items), batch_size=1), already_sharded=True)
    found = [batch.item() for batch in loader]
    same("samples", found, [*items, *items][:700])
    gathered = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    same("gathered", gathered, [[step, 1000 + step] if step < 500 else [step] for step in range(700)])


def metrics(setting: Setting) -> None:
    """13 samples on two ranks, one of them padding: all types, tensors in structures, objects."""
    accelerator = setting.accelerator()
    sampler = DistributedSampler(range(13), 2, setting.rank, shuffle=False)
    loader = accelerator.prepare(DataLoader(range(13), batch_size=4, sampler=sampler))
    expected = [[0, 2, 4, 6, 1, 3, 5, 7], [8, 10, 12, 9, 11]]
    steps = 0
    for batch, real in zip(loader, expected):
        steps += 1
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8):
            gathered = accelerator.gather_for_metrics(batch.to(dtype))
            same(f"where {dtype} is", gathered.device, setting.place)
            same(f"{dtype}", (gathered.dtype, gathered.tolist()), (dtype, real))
        found = accelerator.gather_for_metrics(
            {"odd": batch % 2 == 1, "square": (batch[:, None].expand(-1, 3), batch[:, None, None].float())}
        )
        same("booleans", found["odd"].tolist(), [item % 2 == 1 for item in real])
        same("rows", found["square"][0].tolist(), [[item] * 3 for item in real])
        same("blocks", found["square"][1].tolist(), [[[item]] for item in real])
        words = accelerator.gather_for_metrics([f"sample {item}" for item in batch.tolist()])
        same("objects", words, [f"sample {item}" for item in real])
        # Repeated for each sample, as a `Trainer` does.
        losses = accelerator.gather_for_metrics(batch.float().mean().repeat(len(batch)))
        same("losses", len(losses), len(real))
    same("steps", steps, 2)


def empty_rank(setting: Setting) -> None:
    """A rank without a batch is an error on both ranks, and nothing hangs."""
    accelerator = setting.accelerator()
    for name, make in (("list", list), ("stream", Stream)):
        own = make([] if setting.rank == 1 else [1.0, 2.0, 3.0])
        try:
            list(accelerator.prepare(DataLoader(own), already_sharded=True))
        except ValueError as error:
            same(f"rank 1 is named, {name}", "rank 1" in str(error), True)
        else:
            raise AssertionError(f"no error, {name}")


# ----------------------------------------------------------------------------------------------------------- resuming

STOP, EPOCHS, SHUFFLED = 3, 2, 21  # 21 samples on two ranks: 11 on each, 6 batches


def _resumable(setting: Setting) -> tuple:
    torch.manual_seed(setting.rank)
    accelerator = setting.accelerator()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5)
    samples = [torch.tensor([float(item)]) for item in range(SHUFFLED)]
    sampler = DistributedSampler(samples, 2, setting.rank, shuffle=True, seed=7)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=2, sampler=sampler))


def _go_through(setting, accelerator, model, optimizer, loader, first=None, stop=None) -> dict:
    epochs = []
    while loader.iteration < EPOCHS:
        epochs.append([])
        for batch in loader if first is None else first:
            accelerator.backward(2 * model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            real = accelerator.gather_for_metrics(batch).flatten().tolist()
            same("where the batch is", batch.device, setting.place)
            epochs[-1].append([batch.flatten().tolist(), real])
            if len(epochs[-1]) == stop:
                return {"epochs": epochs, "weights": _weights(model)}
        first = None
    return {"epochs": epochs, "weights": _weights(model)}


def _record(setting: Setting) -> Path:
    return Path(setting.folder) / f"uninterrupted_{setting.rank}.json"


def uninterrupted(setting: Setting) -> None:
    """Two epochs at once, for comparison."""
    found = _go_through(setting, *_resumable(setting))
    for epoch in found["epochs"]:
        seen = sorted(int(item) for _, real in epoch for item in real)
        same("samples of an epoch", seen, list(range(SHUFFLED)))
    same("epochs in another order", found["epochs"][0] != found["epochs"][1], True)
    _record(setting).write_text(json.dumps(found), encoding="utf-8")


def interrupted(setting: Setting) -> None:
    """Stop in the middle of an epoch and save."""
    accelerator, *prepared = _resumable(setting)
    found = _go_through(setting, accelerator, *prepared, stop=STOP)
    accelerator.save_state(str(Path(setting.folder) / "checkpoint"))
    whole = json.loads(_record(setting).read_text(encoding="utf-8"))
    same("steps before the stop", found["epochs"], [whole["epochs"][0][:STOP]])


def resumed(setting: Setting) -> None:
    """In new processes, go on with the batch at which they stopped."""
    accelerator, model, optimizer, loader = _resumable(setting)
    accelerator.load_state(str(Path(setting.folder) / "checkpoint"))
    first = accelerator.skip_first_batches(loader, loader.batches_yielded)
    found = _go_through(setting, accelerator, model, optimizer, loader, first)
    whole = json.loads(_record(setting).read_text(encoding="utf-8"))
    same("steps behind the stop", found["epochs"], [whole["epochs"][0][STOP:], whole["epochs"][1]])
    same("weights", found["weights"], whole["weights"])


# ---------------------------------------------------------------------------------------------- with a GPU for each rank


def joined(setting: Setting) -> None:
    """`join_uneven_inputs`: 3 and 5 steps, and the gradients of those that are there count."""
    accelerator = setting.accelerator()
    on_gpus = getattr(accelerator, "multi_device", accelerator.distributed_type == DistributedType.MULTI_GPU)
    same("Accelerate joins here", on_gpus, True)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(_samples(setting.rank), batch_size=2), already_sharded=True
    )
    with accelerator.join_uneven_inputs([model], even_batches=False):
        steps = _train(setting, accelerator, loader, model, optimizer)
    same("steps", [own for own, _, _ in steps], OWN[setting.rank])
    same("weights", _weights(model), [JOINED] * 2)
    same("steps afterwards", len(list(loader)), 5)


def fsdp2(setting: Setting) -> None:
    """Parameters that are sharded too, beside streams of different lengths."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    _check_training(setting, Stream(_samples(setting.rank)), fsdp_plugin=plugin)


def _on_mesh(setting: Setting, **sizes: int) -> Accelerator:
    # Without a handler, transformers has to be installed. It holds nothing that loaders care for.
    mesh = accelerate.utils.ParallelismConfig(tp_handler=object(), tp_size=2, **sizes)
    return setting.accelerator(parallelism_config=mesh)


def tensor_parallel(setting: Setting) -> None:
    """Two ranks that share all batches."""
    accelerator = _on_mesh(setting)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2), already_sharded=True)
    found = []
    for batch in loader:
        same("where the batch is", batch.device, setting.place)
        found.append(batch.tolist())
    same("batches", found, [[0, 1], [2, 3], [4]])


def tensor_and_data_parallel(setting: Setting) -> None:
    """Four ranks: the first two share batches, and the others do."""
    accelerator = _on_mesh(setting, dp_shard_size=2)
    index = setting.rank // 2
    sampler = DistributedSampler(range(11), 2, index, shuffle=False)
    cut = accelerator.prepare(DataLoader(range(11), batch_size=2, sampler=sampler))
    own = [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 0]]][index]
    real = [[0, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9]]
    steps = []
    for batch in cut:
        same("where the batch is", batch.device, setting.place)
        steps.append((batch.tolist(), accelerator.gather_for_metrics(batch).tolist()))
    same("steps", steps, list(zip(own, real)))
    stream = DataLoader(Stream([10 * index + item for item in range(2 + index)]))
    stream = accelerator.prepare(stream, already_sharded=True)
    own = [[[0], [1], [0]], [[10], [11], [12]]][index]
    steps = [(batch.tolist(), accelerator.gather_for_metrics(batch).tolist()) for batch in stream]
    same("steps of the stream", steps, list(zip(own, [[0, 10], [1, 11], [12]])))
    wrong = DistributedSampler(range(11), 4, setting.rank, shuffle=False)
    try:
        accelerator.prepare(DataLoader(range(11), batch_size=2, sampler=wrong))
    except ValueError as error:
        same("both sizes are named", "size 4" in str(error) and "size 2" in str(error), True)
    else:
        raise AssertionError("no error for data that is cut for all four ranks")


# With both backends.
ANYWHERE = (
    Check("batches are on the device", (on_the_device,)),
    Check("pinned batches are copied without waiting", (pinned_and_non_blocking,)),
    Check("uneven shards make equally many steps", (uneven_shards,)),
    Check("uneven streams make equally many steps", (uneven_streams,)),
    Check("long streams make equally many steps", (long_streams,)),
    Check("gather_for_metrics returns each real sample once", (metrics,)),
    Check("a rank without batches is an error on both", (empty_rank,)),
    Check("training goes on in new processes where it stopped", (uninterrupted, interrupted, resumed)),
)
_LACKS_FSDP2 = "" if accelerate.utils.is_torch_version(">=", "2.6.0") else "FSDP2 needs torch 2.6"
_LACKS_MESH = "" if hasattr(accelerate.utils, "ParallelismConfig") else "this accelerate has no ParallelismConfig"

# What Accelerate does with GPU ranks only.
GPU_RANKS = (
    Check("join_uneven_inputs joins", (joined,)),
    Check("FSDP2", (fsdp2,), lacks=_LACKS_FSDP2),
    Check("a tensor-parallel mesh", (tensor_parallel,), lacks=_LACKS_MESH),
    Check("a tensor- and data-parallel mesh", (tensor_and_data_parallel,), num_ranks=4, lacks=_LACKS_MESH),
)


def run_on_rank(rank: int, name: str, number: int, device: str, backend: str, folder: str) -> None:
    """Be one rank in one run of the check with this name."""
    # What detection and evening say is long, and is not asked about here.
    logging.getLogger("accelerate_presharded").setLevel(logging.ERROR)
    check = next(check for check in ANYWHERE + GPU_RANKS if check.name == name)
    check.runs[number](Setting(device, backend, folder, rank))
