"""What a folder of photographs or scans becomes: its files listed, decoded, imported, checked.

It imports `core`, `privacy` and `data`. Only the commands and `bam.release.predict` import it.
"""
