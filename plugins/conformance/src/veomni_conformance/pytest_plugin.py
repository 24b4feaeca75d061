"""Options of pytest that check a plugin's kernels: ``pytest --veomni-plugin acme``.

pytest imports this module in every session in which veomni-conformance is installed. It imports nothing else unless
``--veomni-plugin`` is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("veomni", "VeOmni: check the kernels of plugins")
    group.addoption(
        "--veomni-plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="check every kernel of this plugin against its op's contract; without a path, collect nothing else",
    )
    group.addoption(
        "--veomni-device", metavar="DEVICE", help="where (cpu, cuda, cuda:1, ...); default: what is found here"
    )
    group.addoption(
        "--veomni-triton-interpreter",
        action="store_true",
        help="on a machine without an accelerator, run kernels for GPUs in Triton's interpreter",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register what collects the kernels, if a plugin is named."""
    if config.option.veomni_plugin:
        from veomni_conformance.pytest_items import KernelItems

        config.pluginmanager.register(KernelItems(config), "veomni-kernels")
