"""One file for each kind of file that data comes in. All of them may be a stranger's."""
