"""``python -m veomni_core.cli`` is ``veomni``."""

from veomni_core.cli import main

main()
