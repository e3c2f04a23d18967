"""`torchrun -m trainer train ...`: the command line as one of several ranks."""

from lake.cli import main

if __name__ == "__main__":
    main()
