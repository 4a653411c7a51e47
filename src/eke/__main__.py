"""`python -m eke`, which torchrun needs."""

from eke.cli import main

if __name__ == "__main__":
    main()
