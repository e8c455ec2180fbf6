"""Run the command line: `python -m ultraep`."""

from ultraep.tools.cli import main

if __name__ == "__main__":
    main()
