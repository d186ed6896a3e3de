# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""`python -m accelerate_presharded` is the command `accelerate-presharded`."""

import sys

from .cli import main


# Not so in the children of `multiprocessing`, which import this under another name.
if __name__ == "__main__":
    sys.exit(main())
