"""The error of a patch that doesn't fit."""

from __future__ import annotations

from veomni_core.errors import ConfigError


class PatchError(ConfigError):
    """A patch doesn't fit the modeling code: its target is gone, it changes nothing, or a name of it means nothing.

    Change the patch as the message says, and generate again.
    """
