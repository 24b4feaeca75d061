"""Makes ``python -m veomni_core.cli`` run ``veomni``."""

from veomni_core.cli import main

main()
