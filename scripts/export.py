"""Another name of `bam export`."""

from bam.cli.main import run

if __name__ == "__main__":
    run("export")
