"""`python -m palimpsest`."""

import sys

from palimpsest.cli.main import main

sys.exit(main())
