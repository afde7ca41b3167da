"""``python -m kvlab``: the command ``kvlab``."""

import sys

from kvlab.command import main

if __name__ == "__main__":
    if not sys.flags.safe_path:  # this folder goes last: no file in it hides a module that the command needs
        sys.path.append(sys.path.pop(0))
    main()
