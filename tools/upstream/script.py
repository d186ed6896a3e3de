# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Checks dataloaders that are already sharded across ranks, on any number of processes and any device."""

import tempfile

import torch
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from accelerate_presharded import Accelerator, PreshardedDataLoader


class OwnStream(IterableDataset):
    """Yields the items of one rank, and says nothing of ranks."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def seen(batches):
    """What all ranks have seen, rank by rank."""
    return gather_object([item for batch in batches for item in batch.tolist()])


def check_sampler_is_detected(accelerator):
    length = 8 * accelerator.num_processes
    sampler = DistributedSampler(range(length), accelerator.num_processes, accelerator.process_index, shuffle=False)
    loader = DataLoader(range(length), batch_size=2, sampler=sampler)
    prepared = accelerator.prepare(loader)
    assert len(prepared) == 4
    assert sorted(seen(prepared)) == list(range(length))
    if accelerator.num_processes > 1:
        assert isinstance(prepared, PreshardedDataLoader)


def check_own_items(accelerator):
    own = list(range(8 * accelerator.process_index, 8 * accelerator.process_index + 8))
    everything = list(range(8 * accelerator.num_processes))
    for dataset in (own, OwnStream(own)):
        loader = accelerator.prepare(DataLoader(dataset, batch_size=2), already_sharded=True)
        batches = list(loader)
        assert all(batch.device.type == accelerator.device.type for batch in batches)
        assert seen(batches) == everything


def check_ordinary_loader_is_sharded(accelerator):
    length = 8 * accelerator.num_processes
    loader = accelerator.prepare(DataLoader(range(length), batch_size=2))
    assert not isinstance(loader, PreshardedDataLoader)
    assert sorted(seen(loader)) == list(range(length))


def check_uneven_ranks_make_even_steps(accelerator):
    # Rank r has r + 1 batches. All make as many steps as the last, and each sample counts once.
    rank, size = accelerator.process_index, accelerator.num_processes
    own = [100 * rank + item for item in range(2 * rank + 2)]
    loader = accelerator.prepare(DataLoader(own, batch_size=2), already_sharded=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    steps, counted = 0, []
    for batch in loader:
        steps += 1
        accelerator.backward(model(batch[:, None].float()).sum())
        counted += accelerator.gather_for_metrics(batch).tolist()
    assert steps == size
    assert sorted(counted) == [100 * other + item for other in range(size) for item in range(2 * other + 2)]


def check_each_rank_resumes(accelerator):
    own = list(range(8 * accelerator.process_index, 8 * accelerator.process_index + 8))

    def prepare():
        accelerator.free_memory()
        return accelerator.prepare(DataLoader(own, batch_size=2, shuffle=True), already_sharded=True)

    (folder,) = broadcast_object_list([tempfile.mkdtemp() if accelerator.is_main_process else None])
    set_seed(3, device_specific=True)
    loader = prepare()
    for _ in range(2):
        list(loader)
    accelerator.save_state(folder)
    expected = [batch.tolist() for batch in loader]
    resumed = prepare()
    accelerator.load_state(folder)
    assert resumed.iteration == 2
    assert [batch.tolist() for batch in resumed] == expected


def main():
    accelerator = Accelerator()
    for check in (
        check_sampler_is_detected,
        check_own_items,
        check_ordinary_loader_is_sharded,
        check_uneven_ranks_make_even_steps,
        check_each_rank_resumes,
    ):
        accelerator.print(check.__name__)
        check(accelerator)
    accelerator.print("All checks passed.")
    accelerator.end_training()


if __name__ == "__main__":
    main()
