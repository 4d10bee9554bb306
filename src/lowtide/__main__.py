"""`python -m lowtide` is the `lowtide` command."""

from lowtide.cli.main import main

if __name__ == "__main__":
    main()
