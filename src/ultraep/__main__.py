"""`python -m ultraep`: the same as the command `ultraep`."""

from ultraep.tools.cli import main

if __name__ == "__main__":
    main()
