"""`python -m bam COMMAND` is `bam COMMAND`."""

from bam.cli.main import main

if __name__ == "__main__":
    main()
