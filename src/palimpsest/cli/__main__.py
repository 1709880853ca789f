"""`python -m palimpsest.cli`."""

import sys

from palimpsest.cli.main import main

sys.exit(main())
