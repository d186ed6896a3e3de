# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""
Stand-ins for the samplers and datasets of libraries that the tests do not install.

Each carries the attributes that the real object carries, under the real names, and nothing of its behaviour: these
are for looking at, not for iterating. A method that is called all the same raises, and is noted in `CALLED`, so that a
call whose exception somebody swallowed shows up too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler


CALLED: list[str] = []


def refuse(obj: Any, method: str) -> None:
    CALLED.append(f"{type(obj).__name__}.{method}")
    raise AssertionError(f"{type(obj).__name__}.{method} was called by something that should only look.")


class LookOnly:
    """What detection has no business calling."""

    def __iter__(self) -> Iterator:
        refuse(self, "__iter__")

    def __next__(self):
        refuse(self, "__next__")

    def __len__(self) -> int:
        refuse(self, "__len__")

    def __getitem__(self, index):
        refuse(self, "__getitem__")

    def set_epoch(self, epoch):
        refuse(self, "set_epoch")

    def state_dict(self):
        refuse(self, "state_dict")


class LookOnlySampler(LookOnly, Sampler):
    pass


class LookOnlyDataset(LookOnly, Dataset):
    """Map-style."""


class LookOnlyStream(LookOnly, IterableDataset):
    pass


# torchdata


class StatefulDistributedSampler(DistributedSampler):
    """torchdata: torch's own class with a position."""

    def __init__(self, dataset, num_replicas, rank):
        super().__init__(dataset, num_replicas=num_replicas, rank=rank)
        self.yielded, self.next_yielded = 0, None


# transformers


class DistributedSamplerWithLoop(DistributedSampler):
    """transformers: torch's own class with a batch size."""

    def __init__(self, dataset, batch_size, num_replicas, rank):
        super().__init__(dataset, num_replicas=num_replicas, rank=rank)
        self.batch_size = batch_size


class DistributedLengthGroupedSampler(LookOnlySampler):
    """transformers."""

    def __init__(self, lengths, batch_size, num_replicas, rank):
        self.lengths, self.batch_size = lengths, batch_size
        self.num_replicas, self.rank = num_replicas, rank
        self.epoch = self.seed = 0
        self.drop_last = False


class LengthGroupedSampler(LookOnlySampler):
    """transformers: groups by length and shards nothing."""

    def __init__(self, lengths, batch_size):
        self.lengths, self.batch_size, self.generator = lengths, batch_size, None


class ShardSampler(LookOnlySampler):
    """transformers."""

    def __init__(self, dataset, batch_size, num_processes, process_index):
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, False
        self.num_processes, self.process_index = num_processes, process_index
        self.total_batch_size = batch_size * num_processes


class TransformersIterableDatasetShard(LookOnlyStream):
    """transformers' `IterableDatasetShard`, which is not a subclass of accelerate's."""

    def __init__(self, dataset, batch_size, num_processes, process_index):
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, False
        self.num_processes, self.process_index = num_processes, process_index
        self.seed = self.epoch = self.num_examples = 0


class BatchRebalanceSampler(LookOnlySampler):
    """transformers: a plain `Sampler` that yields batches."""

    def __init__(self, lengths, dp_size, rank):
        self.lengths, self.dp_size, self.rank = lengths, dp_size, rank


# datasets


@dataclass
class DistributedConfig:
    rank: int
    world_size: int


class HFIterableDataset(LookOnlyStream):
    """datasets' `IterableDataset`. `split_dataset_by_node` sets `_distributed`, and `map` and the like keep it."""

    def __init__(self, distributed=None):
        self._distributed, self._epoch, self._info = distributed, 0, None

    @property
    def n_shards(self):
        return 4

    @property
    def num_shards(self):
        return 4


class HFDataset(LookOnlyDataset):
    """datasets' map-style `Dataset`, which forgets that it was split: `_data` is its table."""

    def __init__(self):
        self._data, self._indices, self._fingerprint = LookOnly(), None, "f1e2d3"


# webdataset


class SimpleShardList(LookOnlyStream):
    def __init__(self, urls):
        self.urls, self.seed = urls, None


def split_by_node(src, group=None):
    CALLED.append("split_by_node")
    raise AssertionError("a stage of the pipeline was run")


def split_by_worker(src):
    CALLED.append("split_by_worker")
    raise AssertionError("a stage of the pipeline was run")


def single_node_only(src, group=None):
    CALLED.append("single_node_only")
    raise AssertionError("a stage of the pipeline was run")


class DataPipeline(LookOnlyStream):
    """webdataset: a list of stages, the first a source and the others functions of the stage before."""

    def __init__(self, *stages):
        self.pipeline, self.length, self.repetitions, self.nsamples = list(stages), -1, 1, -1


class WebDataset(DataPipeline):
    def __init__(self, urls, nodesplitter=single_node_only):
        super().__init__(SimpleShardList(urls), nodesplitter, split_by_worker)


# mosaicml-streaming


@dataclass
class World:
    """Counts of ranks and of workers, where a worker's numbers must not be taken for a rank's."""

    num_ranks: int
    rank: int
    num_nodes: int = 1
    node: int = 0
    workers_per_rank: int = 3
    num_workers: int = field(init=False)
    worker: int = field(init=False)

    def __post_init__(self):
        self.num_workers = self.num_ranks * self.workers_per_rank
        self.worker = self.rank * self.workers_per_rank


class MosaicStreamingDataset(LookOnlyStream):
    """mosaicml-streaming's `StreamingDataset`, with a replication: two ranks read each shard."""

    def __init__(self, num_ranks, rank):
        self._unique_rank_world = World(2 * num_ranks, 2 * rank)
        self._parallel_rank_world = World(num_ranks, rank)
        self.batch_size, self.predownload = 4, None


# litdata


@dataclass
class DistributedEnv:
    world_size: int
    global_rank: int
    num_nodes: int = 1


class LitStreamingDataset(LookOnlyStream):
    """litdata's `StreamingDataset`."""

    def __init__(self, world_size, global_rank):
        self.distributed_env = DistributedEnv(world_size, global_rank)
        self.worker_env, self.cache, self.seed = None, None, 42


class CombinedStreamingDataset(LookOnlyStream):
    """litdata."""

    def __init__(self, datasets):
        self._datasets, self._weights, self._iterator = list(datasets), None, None


# megatron-energon


@dataclass
class WorkerConfig:
    rank: int
    world_size: int
    num_workers: int = 4


class SavableDatasetWrapper(LookOnlyStream):
    """megatron-energon: every dataset of the chain holds the same `worker_config`, `dataset` is the next one."""

    def __init__(self, worker_config, dataset=None):
        self.worker_config = worker_config
        if dataset is not None:
            self.dataset = dataset


# timm


class OrderedDistributedSampler(LookOnlySampler):
    """timm."""

    def __init__(self, dataset, num_replicas, rank):
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank


class RepeatAugSampler(LookOnlySampler):
    """timm."""

    def __init__(self, dataset, num_replicas, rank):
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.shuffle, self.num_repeats, self.epoch = True, 3, 0


class ReaderTfds(LookOnly):
    def __init__(self, dist_num_replicas, dist_rank):
        self.dist_num_replicas, self.dist_rank = dist_num_replicas, dist_rank
        self.worker_info, self.num_workers, self.global_num_workers = None, 1, dist_num_replicas


class IterableImageDataset(LookOnlyStream):
    """timm."""

    def __init__(self, reader):
        self.reader, self.transform = reader, None


# lhotse


class SimpleCutSampler(LookOnlySampler):
    """lhotse: yields whole batches, from a loader with `batch_size=None`."""

    def __init__(self, world_size, rank):
        self.world_size, self.rank = world_size, rank
        self.shuffle, self.seed, self.epoch, self.drop_last = True, 0, 0, False

    @property
    def num_cuts(self):
        raise NotImplementedError("lazy cuts have no number")


class DynamicBucketingSampler(SimpleCutSampler):
    """lhotse."""


# detectron2


class TrainingSampler(LookOnlySampler):
    """detectron2: infinite."""

    def __init__(self, size, world_size, rank):
        self._size, self._shuffle, self._seed = size, True, 0
        self._world_size, self._rank = world_size, rank


class InferenceSampler(LookOnlySampler):
    """detectron2: uneven."""

    def __init__(self, size, world_size, rank):
        self._size, self._world_size, self._rank = size, world_size, rank
        self._local_indices = range(rank, size, world_size)


# NeMo


class MegatronPretrainingBatchSampler(LookOnly):
    """NeMo: no class in common with torch's samplers."""

    def __init__(self, total_samples, data_parallel_size, data_parallel_rank):
        self.total_samples, self.consumed_samples = total_samples, 0
        self.data_parallel_size, self.data_parallel_rank = data_parallel_size, data_parallel_rank
        self.micro_batch_size, self.drop_last = 2, True
