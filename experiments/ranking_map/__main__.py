"""The command line: `python experiments/ranking_map [options]`."""

import sys
from pathlib import Path

if not __package__:  # run as a folder, whose parent Python does not search
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from ranking_map.command import main

if __name__ == "__main__":
    main()
