"""torchtitan.train with our configurations: torchrun -m seqzoo_plugins.torchtitan --config hgrn2+attention ..."""

import sys

from torchtitan.train import main

if __name__ == "__main__":
    if not any(argument.split("=")[0] == "--module" for argument in sys.argv[1:]):
        sys.argv[1:1] = ["--module", "seqzoo_plugins.torchtitan"]
    main()
