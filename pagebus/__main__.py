"""`python -m pagebus`: the same as the `pagebus` command."""

from pagebus.cli import main

if __name__ == "__main__":
    main()
