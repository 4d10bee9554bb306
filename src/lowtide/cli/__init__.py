"""The command line.

This module imports nothing, so that an interrupt during start-up ends the program cleanly.
"""

EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + 2  # as a shell reports a program that SIGINT ended
