# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Benchmarks: every figure is a ratio between things that were measured alternately in one run. See README.md."""
