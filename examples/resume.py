# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Trains on data that each rank reads for itself, stops at some step, and goes on from there when started again.

    torchrun --nproc_per_node 2 examples/resume.py --cpu --folder /tmp/run --stop-at 5
    torchrun --nproc_per_node 2 examples/resume.py --cpu --folder /tmp/run

The second start trains on what the first has not, rank by rank, and nothing twice.
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

from accelerate_presharded import Accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description="Stop and go on, each rank in its own data.")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU, whatever else is there")
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoint is")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop-at", type=int, help="save and stop after so many steps, counted over all epochs")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=args.cpu)
    rank = accelerator.process_index
    checkpoint = args.folder / "checkpoint"

    # Each rank has its own numbers, and not equally many: 10 on rank 0, 13 on rank 1, ...
    mine = [100 * rank + number for number in range(10 + 3 * rank)]
    loader = DataLoader(torch.tensor(mine, dtype=torch.float32), batch_size=2, shuffle=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader, already_sharded=True)

    this_epoch, steps = loader, 0
    if checkpoint.exists():
        accelerator.load_state(checkpoint)
        # Where each rank was in its epoch; a loader that keeps its own place is already there.
        this_epoch = accelerator.skip_first_batches(loader, loader.batches_yielded)
        accelerator.print(f"Going on in epoch {loader.iteration} behind batch {loader.batches_yielded}.")

    seen = []
    while loader.iteration < args.epochs:
        for batch in this_epoch:
            loss = model(batch[:, None] / 100).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append([int(number) for number in batch])
            steps += 1
            if steps == args.stop_at:
                accelerator.save_state(checkpoint)
                break
        if steps == args.stop_at:
            break
        this_epoch = loader

    args.folder.mkdir(parents=True, exist_ok=True)
    part = "before" if args.stop_at else "after"
    (args.folder / f"{part}_rank{rank}.json").write_text(json.dumps(seen))
    accelerator.print(f"{steps} steps.")
    accelerator.end_training()


if __name__ == "__main__":
    main()
