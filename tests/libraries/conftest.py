"""Keeps the libraries from asking the network, before any of them is imported."""

import os


for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[name] = "1"
