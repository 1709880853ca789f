"""`python -m palimpsest`."""

import sys

from palimpsest_entry import main

sys.exit(main())
