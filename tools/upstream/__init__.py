# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""Writes this package's feature into the sources of Accelerate."""
