"""Runs the faults: ``cd scripts && python -m faults --help``."""

import sys

from faults.run import main

sys.exit(main())
