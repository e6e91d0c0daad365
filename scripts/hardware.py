"""Another name of `bam hardware`."""

from bam.cli.main import run

if __name__ == "__main__":
    run("hardware")
