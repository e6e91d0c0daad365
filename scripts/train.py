"""`python -m scripts.train` is `bam train`."""

import sys

from bam.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
