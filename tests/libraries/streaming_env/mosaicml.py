# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Imports `streaming`, also beside a torch for the CPU alone.

`streaming` imports torchvision for its datasets of pictures, which nothing here uses, and torchvision's wheels are
built for CUDA: without it they cannot be imported. In that case something empty stands in for it.

A rank that finds shared memory of another waits 7 ms until that has its size, which is too short on a busy machine.
"""

import importlib.machinery
import sys
import types


def stand_in(name: str, **names) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(names)
    sys.modules[name] = module


try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    stand_in("torchvision")
    stand_in("torchvision.datasets", VisionDataset=object)
    stand_in("torchvision.transforms")
    stand_in("torchvision.transforms.functional", to_tensor=None)

import streaming.base.shared.memory  # noqa: E402


streaming.base.shared.memory.TICK = 0.1
