# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Trains a small classifier on handwritten digits, on ranks that each hold their own part of the data.

    torchrun --nproc_per_node 2 examples/digits.py --cpu
    accelerate launch --num_processes 2 examples/digits.py  # with two GPUs

The training data is split by a `DistributedSampler`, which is detected. The evaluation data is split by taking every
n-th sample, which leaves nothing to detect and so needs the word `True`. With `--plain` the same script runs on plain
Accelerate, which splits both a second time.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def digits() -> tuple[Subset, Subset]:
    """1,797 images of 8 x 8 pixels, each with its label and its own number; every fifth is kept for evaluation."""
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(
        torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels), torch.arange(len(labels))
    )
    everything = range(len(dataset))
    return (
        Subset(dataset, [i for i in everything if i % 5]),
        Subset(dataset, [i for i in everything if i % 5 == 0]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small classifier on handwritten digits.")
    parser.add_argument("--plain", action="store_true", help="use plain Accelerate")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU, whatever else is there")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="over all ranks")
    parser.add_argument("--report", type=Path, help="a folder in which each rank writes down what it saw")
    args = parser.parse_args()

    if args.plain:
        from accelerate import Accelerator

        sharding = {}
    else:
        from accelerate_presharded import Accelerator

        # One word for each object below: None detects, True says that the loader is already sharded.
        sharding = {"already_sharded": [None, None, None, True]}

    set_seed(0)
    accelerator = Accelerator(cpu=args.cpu)
    rank, world_size = accelerator.process_index, accelerator.num_processes

    train_data, eval_data = digits()
    batch_size = args.batch_size // world_size
    sampler = DistributedSampler(train_data, num_replicas=world_size, rank=rank, shuffle=True)
    train_loader = DataLoader(train_data, batch_size=batch_size, sampler=sampler)
    eval_slice = Subset(eval_data, range(rank, len(eval_data), world_size))
    eval_loader = DataLoader(eval_slice, batch_size=batch_size)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, **sharding
    )

    for epoch in range(args.epochs):
        model.train()
        trained_on = []
        for images, labels, numbers in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            trained_on.append(numbers.tolist())
        accelerator.print(f"epoch {epoch}: {len(trained_on)} steps, loss {loss.item():.3f}")

    model.eval()
    evaluated_on, correct = [], 0
    for images, labels, numbers in eval_loader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=-1)
        # From all ranks, each sample once.
        predictions, labels, numbers = accelerator.gather_for_metrics((predictions, labels, numbers))
        correct += (predictions == labels).sum().item()
        evaluated_on += numbers.tolist()
    accuracy = correct / len(evaluated_on)
    accelerator.print(f"accuracy {accuracy:.1%} on {len(evaluated_on)} samples")

    if args.report:
        seen = {
            "train_size": len(train_data),
            "eval_size": len(eval_data),
            "trained_on": trained_on,  # batch by batch, in the last epoch
            "evaluated_on": evaluated_on,  # on all ranks together
            "accuracy": accuracy,
        }
        (args.report / f"rank{rank}.json").write_text(json.dumps(seen))
    accelerator.end_training()


if __name__ == "__main__":
    main()
