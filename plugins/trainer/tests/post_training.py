"""The example jobs of post-training, which lie in the repository alone."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples" / "post_training"
needs_examples = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples lie in the repository")
