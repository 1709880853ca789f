"""`python -m palimpsest.cli`."""

import sys

from palimpsest.cli.commands import main

sys.exit(main())
