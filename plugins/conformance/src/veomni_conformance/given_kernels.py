"""What a registry of given kernels needs besides them, for tests of one plugin."""

from __future__ import annotations

from veomni_core.discovery.discover import discover
from veomni_core.discovery.registry import PluginRecord


def definitions() -> tuple[PluginRecord, ...]:
    """The core's record, and those of the installed ``veomni.definitions``.

    Example:
        >>> from veomni_core.discovery.registry import build_registry
        >>> registry = build_registry(definitions(), {})
        >>> registry.kernels("rms_norm"), registry.op("rms_norm").config_field
        ((), 'rms_norm_implementation')
    """
    loaded = discover({"VEOMNI_DISABLE_PLUGIN_AUTOLOAD": "1"}).plugins
    return tuple(record for record in loaded if record.defines)
