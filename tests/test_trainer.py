# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""The `Trainer` of transformers on data that is already sharded, on two ranks against one process."""

import itertools
import math
import os
import re
from pathlib import Path

import pytest
import torch
from ranks import run


if not pytest.importorskip("transformers").is_torch_available():
    pytest.skip("this version of transformers needs a newer torch", allow_module_level=True)

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402
from transformers.trainer_pt_utils import IterableDatasetShard, ShardSampler  # noqa: E402

from accelerate_presharded import patch_accelerate  # noqa: E402


def sample(index: int) -> dict[str, torch.Tensor]:
    """One input, and the target of a line with a bend, so that every sample pulls the weights elsewhere."""
    x = torch.tensor([index / 10.0, 1.0])
    return {"index": torch.tensor(index), "x": x, "labels": 3 * x[:1] - 1 + (index % 5) / 5}


class Numbers(Dataset):
    def __init__(self, length: int):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return sample(index)


class Shard(IterableDataset):
    """This rank's part of a stream, which says so with a pair of attributes."""

    def __init__(self, length: int, num_shards: int, index: int):
        self.length, self.world_size, self.rank = length, num_shards, index

    def __iter__(self):
        return map(sample, range(self.rank, self.length, self.world_size))


class Model(torch.nn.Module):
    """A line, which notes what it is trained with."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(self.line.weight)
        self.trained_on = []

    def forward(self, index, x, labels):
        if self.training:
            self.trained_on.append(index.tolist())
        predicted = self.line(x)
        return {"loss": torch.nn.functional.mse_loss(predicted, labels), "logits": (predicted, index)}


class Brings(Trainer):
    """A `Trainer` whose loaders are made by a function of the user."""

    def __init__(self, *args, loader, **kwargs):
        super().__init__(*args, **kwargs)
        self.loader = loader

    def get_train_dataloader(self):
        return self.accelerator.prepare(self.loader(self.args))

    def get_eval_dataloader(self, eval_dataset=None):
        return self.accelerator.prepare(self.loader(self.args))

    get_test_dataloader = get_eval_dataloader


def sampled(length: int, batch_size: int = 2, shuffle: bool = False):
    """Makes loaders with a `DistributedSampler`; on one process all of the data in order."""

    def make(args: TrainingArguments) -> DataLoader:
        data = Numbers(length)
        size, rank = args.world_size, args.process_index
        sampler = DistributedSampler(data, size, rank, shuffle=shuffle, seed=5) if size > 1 or shuffle else None
        return DataLoader(data, batch_size=batch_size * 2 // size, sampler=sampler)

    return make


def trainer(kind=Trainer, patched=True, folder="unused", **kwargs) -> Trainer:
    """A trainer with plain gradient descent, so that the weights tell what each step was made of."""
    if patched:
        patch_accelerate()
    settings = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_grad_norm": 0.0,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        **kwargs.pop("settings", {}),
    }
    return kind(model=Model(), args=TrainingArguments(folder, **settings), **kwargs)


def weights(trained: Trainer) -> list[float]:
    return trained.model.line.weight.flatten().tolist()


def trained(length, patched=True, settings=None):
    made = trainer(Brings, patched, loader=sampled(length), settings=settings or {})
    made.train()
    return made.model.trained_on, weights(made)


def together(ranks: list, step: int) -> list[int]:
    """What all ranks have read at one step."""
    return sorted(itertools.chain.from_iterable(rank[step] for rank in ranks))


@pytest.mark.parametrize("length", [16, 18])
def test_train_with_a_loader_of_ones_own(length):
    [(alone, expected)] = run(1, trained, length)
    steps = math.ceil(length / 4)
    assert alone == [list(range(start, min(start + 4, length))) for start in range(0, length, 4)] * 2
    results = run(2, trained, length)
    read = [result[0] for result in results]
    assert [len(batches) for batches in read] == [2 * steps] * 2
    assert [together(read, step) for step in range(2 * steps)] == alone
    for _, found in results:
        assert found == pytest.approx(expected)


def test_without_the_patch_it_reads_half():
    read = [result[0] for result in run(2, trained, 16, False)]
    assert len(set(itertools.chain.from_iterable(itertools.chain.from_iterable(read)))) == 8


def test_train_with_accumulated_gradients():
    settings = {"gradient_accumulation_steps": 2}
    [(_, expected)] = run(1, trained, 20, settings=settings)
    for read, found in run(2, trained, 20, settings=settings):
        assert len(read) == 10  # 5 steps in each epoch, of which the last is accumulated alone
        assert found == pytest.approx(expected)


def streamed(make, length, settings=None):
    settings = {"max_steps": length // 4} | (settings or {})
    made = trainer(settings=settings, train_dataset=None)
    made.train_dataset = make(length, made.args.world_size, made.args.process_index)
    made.train()
    return made.model.trained_on, weights(made)


def split_by_node(length, num_shards, index):
    import datasets
    from datasets.distributed import split_dataset_by_node

    def generate(start):
        for first in start:
            for number in range(first, length, 2):
                entry = sample(number)
                yield {name: value.tolist() for name, value in entry.items()}

    shards = datasets.IterableDataset.from_generator(generate, gen_kwargs={"start": [0, 1]}).with_format("torch")
    return split_dataset_by_node(shards, rank=index, world_size=num_shards)


@pytest.mark.parametrize("make", [Shard, split_by_node])
def test_train_with_a_stream_that_is_already_sharded(make):
    if make is split_by_node:
        pytest.importorskip("datasets")
    [(_, expected)] = run(1, streamed, Shard, 16, settings={"per_device_train_batch_size": 4})
    results = run(2, streamed, make, 16)
    read = [result[0] for result in results]
    assert read == [[[first, first + 2] for first in range(rank, 16, 4)] for rank in range(2)]
    for _, found in results:
        assert found == pytest.approx(expected)


def ordinary(patched):
    made = trainer(patched=patched, train_dataset=Numbers(18), eval_dataset=Numbers(9))
    made.train()
    predictions = made.predict(Numbers(9)).predictions[1]
    return made.model.trained_on, weights(made), made.evaluate()["eval_loss"], predictions.tolist()


def test_an_ordinary_trainer_is_unchanged():
    plain, patched = run(2, ordinary, False), run(2, ordinary, True)
    assert patched == plain
    assert plain[0][3] == list(range(9))


def evaluated(make, length, settings=None):
    made = trainer(Brings, loader=make, settings=settings or {})
    made.model.line.weight.data = torch.tensor([[2.0, 0.5]])
    output = made.predict(Numbers(length))
    return (
        made.evaluate()["eval_loss"],
        output.metrics["test_loss"],
        output.predictions[1].tolist(),
        output.label_ids.flatten().tolist(),
    )


def mean_loss(length: int) -> float:
    entries = [sample(index) for index in range(length)]
    line = torch.tensor([2.0, 0.5])
    return sum((entry["x"] @ line - entry["labels"][0]).item() ** 2 for entry in entries) / length


@pytest.mark.parametrize("length", [16, 18, 17])
def test_evaluate_and_predict_count_every_sample_once(length):
    for loss, test_loss, indices, labels in run(2, evaluated, sampled(length), length):
        assert sorted(indices) == list(range(length))
        assert labels == pytest.approx([sample(index)["labels"].item() for index in indices])
        assert loss == pytest.approx(test_loss)
        assert loss == pytest.approx(mean_loss(length))


def shard_sampler(args):
    data = Numbers(12)
    sampler = ShardSampler(data, 2, num_processes=args.world_size, process_index=args.process_index)
    return DataLoader(data, batch_size=2, sampler=sampler)


class Plain(IterableDataset):
    def __iter__(self):
        return map(sample, range(12))


def iterable_shard(args):
    data = IterableDatasetShard(Plain(), 2, num_processes=args.world_size, process_index=args.process_index)
    return DataLoader(data, batch_size=2)


@pytest.mark.parametrize("make", [shard_sampler, iterable_shard])
def test_the_samplers_and_streams_of_transformers_itself(make):
    for loss, _, indices, _ in run(2, evaluated, make, 12):
        assert indices == list(range(12))
        assert loss == pytest.approx(mean_loss(12))


def resumed(folder, part, length=20):
    """Trains in one go, or up to a checkpoint in the second epoch, or from there on."""
    settings = {"save_strategy": "steps", "save_steps": 7} if part == "first" else {}
    settings |= {"max_steps": 7 if part == "first" else 15}
    made = trainer(Brings, folder=folder, loader=sampled(length, shuffle=True), settings=settings)
    made.train(resume_from_checkpoint=f"{folder}/checkpoint-7" if part == "second" else None)
    return made.model.trained_on, weights(made)


def test_resume_from_a_checkpoint(tmp_path):
    whole = run(2, resumed, str(tmp_path / "whole"), "whole")
    first = run(2, resumed, str(tmp_path / "parts"), "first")
    second = run(2, resumed, str(tmp_path / "parts"), "second")
    for rank in range(2):
        assert first[rank][0] + second[rank][0] == whole[rank][0]
        assert second[rank][1] == pytest.approx(whole[rank][1])
    read = [rank[0] for rank in whole]
    for epoch in range(3):
        steps = [together(read, step) for step in range(5 * epoch, 5 * epoch + 5)]
        assert sorted(itertools.chain.from_iterable(steps)) == list(range(20))
    assert read[0][:5] != read[0][5:10]  # every epoch has its own order


def rebalanced():
    class Lengths(Numbers):
        def __getitem__(self, index):
            if index == len(self):
                raise IndexError
            return sample(index) | {"input_ids": [0] * (1 + index % 4)}

    def collate(entries):
        return {name: torch.stack([entry[name] for entry in entries]) for name in ("index", "x", "labels")}

    settings = {"train_sampling_strategy": "batch_rebalance", "num_train_epochs": 1}
    made = trainer(train_dataset=Lengths(16), data_collator=collate, settings=settings)
    made.train()
    return made.model.trained_on


def test_batches_that_transformers_balances_between_ranks():
    first, second = run(2, rebalanced)
    assert len(first) == len(second)
    assert sorted(itertools.chain.from_iterable(first + second)) == list(range(16))


DOCS = Path(__file__).parent.parent / "docs" / "trainer.md"


def execute(source, folder):
    os.chdir(folder)
    exec(compile(source, "docs", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL))
def test_the_code_in_the_docs_runs(block, tmp_path):
    run(2, execute, block, str(tmp_path))
