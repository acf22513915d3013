"""`python -m turngate`."""

from turngate.proxy.cli import main

if __name__ == "__main__":
    main()
