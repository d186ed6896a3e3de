"""Makes the helpers in this directory importable, and ends the rank processes with the session."""

import sys
from pathlib import Path

import pytest


# `pythonpath` in pyproject.toml says the same; this is for runs with another configuration.
HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


def pytest_sessionfinish():
    # Only if a test has imported it: a run without ranks should need nothing of theirs.
    if "ranks" in sys.modules:
        sys.modules["ranks"].shutdown()


@pytest.fixture
def fresh_state():
    """What is prepared without ranks leaves Accelerate's singletons behind."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
