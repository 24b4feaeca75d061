"""Towers of vision and audio: which parts of a model they are, and how one without input runs where models are sharded.

:func:`run_every_tower` does that for a model that is not bound. A bound model does it by itself.
"""

from veomni_transformers.towers.every_tower import EveryTower, run_every_tower
from veomni_transformers.towers.parts import KINDS, tower_of, towers

__all__ = ["KINDS", "EveryTower", "run_every_tower", "tower_of", "towers"]
