"""`ultraep` as a program whose quick demo is tiny: `python tiny_command.py demo --quick`."""

from ultraep_tools.cli import main
from ultraep_tools.demo import sizes

if __name__ == "__main__":
    sizes.QUICK |= {"hidden": 16, "ffn": 32, "tokens": 128, "length": 32}
    sizes.QUICK |= {"requests": 12, "longest": 64, "layer_rounds": 1}
    main()
