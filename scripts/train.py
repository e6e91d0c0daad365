"""Another name of `bam train`."""

from bam.cli.main import run

if __name__ == "__main__":
    run("train")
