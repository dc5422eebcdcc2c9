"""The command line as `python -m seqzoo`, and `torchrun -m seqzoo`."""

from seqzoo.cli import main

if __name__ == "__main__":
    main()
