"""``python -m kvlab``: the command ``kvlab``."""

from kvlab.command import main

if __name__ == "__main__":
    main()
