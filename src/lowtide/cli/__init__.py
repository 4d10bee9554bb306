"""The command line. Imports nothing, so that a program that is interrupted at once can end well."""

EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + 2  # as a shell reports a program that SIGINT ended
