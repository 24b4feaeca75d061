"""The fixtures that the tests of the core and of the distributions beside it share."""

from plugin_fixtures import (  # noqa: F401
    _fresh_counts,
    _plain_environment,
    bf16_accelerator,
    install,
    install_absent,
    install_healthy,
    registry,
    veomni,
)
